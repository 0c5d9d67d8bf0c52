package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/dnsguard/dnsguard/internal/config"
)

// TestInterceptionWaits: that the cluster has not told the address of its DNS Service
// yet is how a start goes, and no error; it is logged once and shown on /readyz.
func TestInterceptionWaits(t *testing.T) {
	var out bytes.Buffer
	d := &daemon{log: slog.New(slog.NewTextHandler(&out, nil)), conditions: newConditions(nil)}
	cfg := &config.Config{
		Intercept:  config.Intercept{Mode: config.InterceptClusterIP},
		Kubernetes: config.Kubernetes{DNSService: config.ServiceName{Namespace: "kube-system", Name: "no-such-dns"}},
	}
	d.cfg = cfg
	i := newInterception(d, cfg)
	for range 3 {
		i.tell(t.Context(), i.apply(t.Context()))
	}
	const reason = "the ClusterIP of the Service kube-system/no-such-dns is not known yet"
	if n := strings.Count(out.String(), "level=INFO msg=waiting"); n != 1 || !strings.Contains(out.String(), reason) || strings.Contains(out.String(), "ERROR") {
		t.Errorf("logged %d times, want once:\n%s", n, out.String())
	}
	if reasons, _ := d.conditions.get(); len(reasons) != 1 || !strings.Contains(reasons[0], reason) {
		t.Errorf("not ready for %q, want %q", reasons, reason)
	}
	i.tell(t.Context(), errors.New("no table"))
	if !strings.Contains(out.String(), `level=ERROR msg=interception error="no table"`) {
		t.Errorf("an error is not logged as one:\n%s", out.String())
	}
	i.tell(t.Context(), nil)
	if reasons, _ := d.conditions.get(); len(reasons) > 0 {
		t.Errorf("not ready for %q afterwards", reasons)
	}
}
