package config

import (
	"bytes"
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFlagsOverFile(t *testing.T) {
	const file = `
listen: [10.0.0.1, 10.0.0.2]
upstreams:
  - {zones: [corp.example], servers: [10.1.2.3], protocol: tcp}
  - {servers: [10.1.2.4]}
cache:
  size: 16Mi
  zones:
    corp.example: {positive: 1m, negative: 1s}
search: {domains: [example.org], expand: true}
guard: {services: [a/b]}
timeouts: {total: 2s}
`
	tests := []struct {
		name string
		args []string
		want string // YAML laid over what the file alone gives
	}{
		{"none", nil, ``},
		{"word", []string{"--cache.size=8Mi"}, `cache.size: 8Mi`},
		{"one dash", []string{"-cache.size=8Mi"}, `cache.size: 8Mi`},
		{"operand apart", []string{"--cache.size", "8Mi"}, `cache.size: 8Mi`},
		{"last of two words", []string{"--cache.size=8Mi", "--cache.size=4Mi"}, `cache.size: 4Mi`},
		{"number and mark", []string{"--search.ndots=2", "--intercept.mark=0x300"}, "search.ndots: 2\nintercept.mark: 0x300"},
		{"text that would be a number in a file", []string{"--kubernetes.nodeName=17"}, `kubernetes.nodeName: "17"`},
		{"empty text", []string{"--http="}, `http: ""`},
		{"boolean alone", []string{"--guard.dryRun"}, `guard.dryRun: true`},
		{"boolean off", []string{"--search.expand=false"}, `search.expand: false`},
		{"list by commas", []string{"--listen=10.0.0.3, ::1"}, `listen: [10.0.0.3, "::1"]`},
		{"list by repetition", []string{"--listen=10.0.0.3", "--listen=::1"}, `listen: [10.0.0.3, "::1"]`},
		{"list emptied", []string{"--search.domains="}, `search.domains: []`},
		{
			"entry",
			[]string{"--upstreams={servers: [10.1.2.5]}"},
			`upstreams: [{zones: [.], servers: [10.1.2.5], protocol: auto}]`,
		},
		{
			"entries by repetition, and the root's default",
			[]string{"--upstreams={zones: [a], servers: [10.1.2.5]}", "--upstreams=[{zones: [b], servers: [10.1.2.6]}]"},
			`upstreams: [{zones: [a], servers: [10.1.2.5]}, {zones: [b], servers: [10.1.2.6]}, {servers: [service]}]`,
		},
		{"entries emptied", []string{"--upstreams="}, `upstreams: [{servers: [service]}]`},
		{
			"zones laid over the file's",
			[]string{"--cache.zones={corp.example: {negative: 2s}}", "--cache.zones={a: {stale: 0s}}"},
			`cache.zones: {corp.example: {positive: 1m, negative: 2s}, a: {stale: 0s}}`,
		},
		{"file's total, flag's stale", []string{"--timeouts.stale=1900ms"}, `timeouts.stale: 1900ms`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			equal(t, parse(t, overlay(t, file, test.want)), parse(t, file, test.args...))
		})
	}
}

// overlay returns the configuration of file with some keys, given by their
// dotted names one a line, written over.
func overlay(t *testing.T, file, over string) string {
	t.Helper()
	text := parse(t, file).String()
	for line := range strings.Lines(over) {
		name, _, _ := strings.Cut(line, ": ")
		section, key, nested := strings.Cut(name, ".")
		begin := strings.Index("\n"+text, "\n"+section+":")
		if nested {
			begin += strings.Index(text[begin:], "    "+key+":") + len("    ")
			line = strings.TrimPrefix(line, section+".")
		}
		end := begin + strings.Index(text[begin:], "\n")
		text = text[:begin] + strings.TrimSpace(line) + text[end:]
	}
	return text
}

// TestFlagNeverFailsToParse is why all problems come out at once: what a flag
// holds is judged with everything else.
func TestFlagNeverFailsToParse(t *testing.T) {
	keys(Default()).leaves(func(path string, k key) {
		fs := flag.NewFlagSet("test", flag.ContinueOnError)
		flags := RegisterFlags(fs)
		if err := fs.Parse([]string{"--" + path + "=!"}); err != nil {
			t.Errorf("--%s: %v", path, err)
		}
		if diff := cmp.Diff([]setting{{path, "!"}}, flags.given, cmp.AllowUnexported(setting{})); diff != "" {
			t.Errorf("--%s (-want +got):\n%s", path, diff)
		}
		if got := fs.Lookup(path).Value.String(); got != "!" {
			t.Errorf("--%s reads %q after it was set", path, got)
		}
	})
}

func TestFlagUsage(t *testing.T) {
	fs := flag.NewFlagSet("test", flag.ContinueOnError)
	RegisterFlags(fs)
	var usage bytes.Buffer
	fs.SetOutput(&usage)
	fs.PrintDefaults()
	golden(t, "testdata/usage.txt", usage.String())
}

func TestFlagsFollowKubernetesSource(t *testing.T) {
	api, err := Load("", parseFlags(t, "--kubernetes.source=api"))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, Default(), api)

	standalone, err := Load("", nil)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, standalone, parse(t, "", "--kubernetes.source=none"))
}

func TestClusterDomainMovesItsCaps(t *testing.T) {
	c := parse(t, "cache: {zones: {cluster.local: {stale: 0s}}}", "--clusterDomain=K8s.Example.")
	want := []CacheZone{
		{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute, Stale: time.Hour},
		{Name: "cluster.local", Positive: time.Hour, Negative: 5 * time.Minute, Stale: 0},
		{Name: "k8s.example", Positive: 30 * time.Second, Negative: 2 * time.Second, Stale: 5 * time.Minute},
	}
	if diff := cmp.Diff(want, c.Cache.Zones); diff != "" {
		t.Errorf("zones (-want +got):\n%s", diff)
	}
}
