// Package labtest is what kernel tests need around package lab: the decision
// whether they can run, and a laboratory or namespace that ends with the test.
// It is apart from lab so that the daemon does not link package testing.
package labtest

import (
	"os"
	"testing"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// RequireEnv names the environment variable that, set to 1, turns the skips of
// Require into failures. CI sets it.
const RequireEnv = "DNSGUARD_REQUIRE_KERNEL"

// Require skips the test where the machine cannot hold a laboratory.
func Require(t testing.TB) {
	t.Helper()
	if err := lab.Available(); err != nil {
		Missing(t, err)
	}
}

// Missing skips the test because the kernel lacks what err says: for a test
// that needs more than Require checks and has probed it.
func Missing(t testing.TB, err error) {
	t.Helper()
	if os.Getenv(RequireEnv) == "1" {
		t.Fatalf("%s=1 forbids to skip: %v", RequireEnv, err)
	}
	t.Skip(err)
}

// RequireSpeed skips a test of losses under load in a run with the race
// detector: it makes everything ten times slower, and the same test runs
// without it.
func RequireSpeed(t testing.TB) {
	t.Helper()
	if race {
		t.Skip("the race detector is on: a load says nothing")
	}
}

// New builds a laboratory for the test.
func New(t testing.TB) *lab.Lab {
	t.Helper()
	Require(t)
	l, err := lab.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close the laboratory: %v", err)
		}
	})
	return l
}

// NewNamespace makes a lone namespace for the test.
func NewNamespace(t testing.TB, label string) *lab.Namespace {
	t.Helper()
	Require(t)
	n, err := lab.NewNamespace(label)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Errorf("close namespace %s: %v", label, err)
		}
	})
	return n
}

// AddPod adds a client pod.
func AddPod(t testing.TB, l *lab.Lab, name string) *lab.Pod {
	t.Helper()
	p, err := l.AddPod(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// AddDNS adds pods with stand-in CoreDNS for the cluster's and the external
// zone, and makes them the endpoints of the DNS Service.
func AddDNS(t testing.TB, l *lab.Lab, names ...string) []*lab.DNSPod {
	t.Helper()
	var pods []*lab.DNSPod
	for _, name := range names {
		p, err := l.AddDNS(t.Context(), name, lab.ClusterZone(), lab.ExternalZone())
		if err != nil {
			t.Fatal(err)
		}
		pods = append(pods, p)
	}
	if err := l.DNS.SetEndpoints(lab.Endpoints(pods...)...); err != nil {
		t.Fatal(err)
	}
	return pods
}
