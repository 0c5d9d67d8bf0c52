package main

import (
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/internal/kube"
)

// TestExplainUsage: what is no question is wrong usage, whether a daemon says so or
// there is none; what a daemon cannot do is not.
func TestExplainUsage(t *testing.T) {
	dir := t.TempDir()
	config := writeFile(t, "config.yaml", "upstreams: [{servers: [192.0.2.1]}]\n")
	answering := func(status int, text string) string {
		t.Helper()
		l, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, http.StatusText(status)[:3]))
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, text, status) })}
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { _ = s.Close() })
		return l.Addr().String()
	}
	nobody := filepath.Join(dir, "none")
	for name, tt := range map[string]struct {
		control string
		args    []string
		code    int
		err     string
	}{
		"no such type":             {nobody, []string{"a.example", "--type", "NOPE"}, exitUsage, `"NOPE" is no type of records`},
		"a type that is not asked": {nobody, []string{"a.example", "--type", "AXFR"}, exitUsage, "AXFR is no type of records that are looked up"},
		"no name":                  {nobody, []string{"a..example"}, exitUsage, "a..example"},
		"no namespace":             {nobody, []string{"a.example", "--namespace", "a.b", "--kubernetes.source=none"}, exitUsage, `"a.b" is no namespace`},
		"two names":                {nobody, []string{"a.example", "b.example"}, exitUsage, "exactly one name"},
		"no client":                {nobody, []string{"a.example", "--client", "me"}, exitUsage, `"me" is not an IP address`},
		"said by a daemon":         {answering(http.StatusBadRequest, "no question"), []string{"a.example"}, exitUsage, "no question"},
		"a daemon in trouble":      {answering(http.StatusInternalServerError, "no way"), []string{"a.example"}, exitWrong, "no way"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, err := dispatched(t, append([]string{"explain", "--config", config, "--control", tt.control}, tt.args...)...)
			if code != tt.code || out != "" || !strings.Contains(err, tt.err) {
				t.Errorf("code %d, output %q, errors %q; want code %d and %q", code, out, err, tt.code, tt.err)
			}
		})
	}
}

// TestFlowsWithoutGuard: a daemon whose guard is off cannot judge flows, which is said
// and exits with 1.
func TestFlowsWithoutGuard(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(t.TempDir(), "sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(new(daemon).flowsHTTP)}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	code, out, text := dispatched(t, "flows", "--control", l.Addr().String())
	if code != exitWrong || out != "" || !strings.Contains(text, "guard.enabled: false") {
		t.Errorf("code %d, output %q, errors %q", code, out, text)
	}
}

// TestUnread: what cannot be read hides nothing else that cannot.
func TestUnread(t *testing.T) {
	forbidden := errors.New("services is forbidden")
	stats := kube.Stats{Watches: []kube.WatchStats{
		{Name: "services a/b", Err: forbidden},
		{Name: "services c/d", Synced: true, Err: forbidden},
		{Name: "endpointslices a/b"},
		{Name: "pods of node n", Err: forbidden},
	}}
	want := []string{"services a/b: services is forbidden", "endpointslices a/b", "pods of node n: services is forbidden"}
	if diff := cmp.Diff(want, unread(stats)); diff != "" {
		t.Errorf("unread (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want[:2], unreadServices(stats)); diff != "" {
		t.Errorf("of Services (-want +got):\n%s", diff)
	}
}
