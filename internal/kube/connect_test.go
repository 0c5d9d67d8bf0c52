package kube

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
)

// TestKubeconfig goes the whole way once: a kubeconfig, TLS, HTTP/2, protobuf,
// a cut, and on real sockets.
func TestKubeconfig(t *testing.T) {
	a := startAPI(t)
	withDNS(a)
	server := httptest.NewUnstartedServer(a)
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()

	path := filepath.Join(t.TempDir(), "kubeconfig")
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	must(t, os.WriteFile(path, fmt.Appendf(nil, `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server.URL, base64.StdEncoding.EncodeToString(ca)), 0o600))

	api, err := NewAPI(APIConfig{Kubeconfig: path, Version: "1.2.3"})
	must(t, err)
	states := make(chan *State, 100)
	c := onlyDNS
	c.Source, c.OnChange = api, func(s *State) { states <- s }
	w, err := New(c)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { w.Run(ctx) })

	await := func(first string) {
		t.Helper()
		timeout := time.After(time.Minute)
		for {
			select {
			case s := <-states:
				if g := s.Guard; g != nil && g.Services[0].Ports[0].Endpoints[0].Addr == addrPort(first) {
					return
				}
			case <-timeout:
				t.Fatalf("no state with %s; stats %+v", first, w.Stats())
			}
		}
	}
	await("10.244.0.2:53")
	server.CloseClientConnections()
	a.put(dnsSlice("kube-dns-a", []string{"10.244.0.7"}))
	await("10.244.0.7:53")

	for _, r := range a.take() {
		h := r.header
		if h.Get("User-Agent") != "dnsguard/1.2.3" || h.Get("Authorization") != "Bearer secret" ||
			!strings.HasPrefix(h.Get("Accept"), runtime.ContentTypeProtobuf) || r.proto != "HTTP/2.0" {
			t.Errorf("%s of %s: %v", r.proto, r.path, h)
		}
	}
}

func TestCannotConnect(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	broken := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(broken, []byte("clusters: 1\n"), 0o600))
	for name, path := range map[string]string{
		"not in a cluster": "", "no kubeconfig": broken + "x", "a broken kubeconfig": broken,
	} {
		if _, err := NewAPI(APIConfig{Kubeconfig: path}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	cfg := startAPI(t).config()
	cfg.CAData = []byte("no certificate")
	if _, err := newAPI(cfg); err == nil {
		t.Error("a CA that is none: no error")
	}
}

// TestRouteLogs has client-go complain of a server that refuses connections,
// and of one that cuts them.
func TestRouteLogs(t *testing.T) {
	var all bytes.Buffer
	RouteLogs(slog.NewTextHandler(&all, &slog.HandlerOptions{Level: slog.Level(-10)}))
	defer RouteLogs(slog.DiscardHandler)
	inBubble(t, onlyDNS, func(a *apiServer) { a.down = true }, func(t *testing.T, r *rig) {
		r.after(time.Minute)
	})
	lines := slices.DeleteFunc(strings.Split(all.String(), "\n"), func(l string) bool { return !strings.Contains(l, "connection refused") })
	if len(lines) == 0 {
		t.Errorf("logged:\n%s", all.String())
	}
	for _, l := range lines {
		if strings.Contains(l, "level=INFO") || strings.Contains(l, "level=ERROR") {
			t.Errorf("an outage in the daemon's log besides our own word on it: %s", l)
		}
	}
}
