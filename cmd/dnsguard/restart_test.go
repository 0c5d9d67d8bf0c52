package main

import (
	"flag"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/internal/config"
)

// TestChangedAtRestart: the keys themselves are named, not their groups.
func TestChangedAtRestart(t *testing.T) {
	for name, tt := range map[string]struct {
		flags []string
		want  []string
	}{
		"nothing":             {nil, nil},
		"what a reload takes": {[]string{"--cache.size=8Mi", "--listen=127.0.0.2", "--limits.readers=2"}, nil},
		"one key":             {[]string{"--intercept.mark=0x300"}, []string{"intercept.mark"}},
		"several": {
			[]string{"--log.format=json", "--intercept.zone=7", "--intercept.exclude=10.0.0.0/8", "--kubernetes.dnsService=dns/coredns", "--control=/run/a.sock", "--http="},
			[]string{"control", "http", "kubernetes.dnsService", "intercept.zone", "intercept.exclude", "log.format"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, changedAtRestart(loadFlags(t), loadFlags(t, tt.flags...))); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("listen", func(t *testing.T) {
		intercepted := []string{"--intercept.mode=link-local", "--listen=169.254.20.10"}
		got := changedAtRestart(loadFlags(t, intercepted...), loadFlags(t, append(intercepted, "--listen=169.254.20.11")...))
		if diff := cmp.Diff([]string{"listen (with interception)"}, got); diff != "" {
			t.Error(diff)
		}
	})
}

// TestKeyNames: each field of these groups is named as its key is.
func TestKeyNames(t *testing.T) {
	keys := flag.NewFlagSet("", flag.ContinueOnError)
	config.RegisterFlags(keys)
	for group, of := range map[string]reflect.Type{
		"kubernetes": reflect.TypeFor[config.Kubernetes](), "intercept": reflect.TypeFor[config.Intercept](),
	} {
		for field := range of.Fields() {
			if key := group + "." + keyName(field.Name); keys.Lookup(key) == nil {
				t.Errorf("field %s: there is no key %s", field.Name, key)
			}
		}
	}
}

// loadFlags returns the configuration of the flags alone.
func loadFlags(t *testing.T, args ...string) *config.Config {
	t.Helper()
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	_, load := configFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(strings.Join(args, " "), err)
	}
	cfg, err := load()
	if err != nil {
		t.Fatal(strings.Join(args, " "), err)
	}
	return cfg
}
