package search

import (
	"bytes"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// FuzzWalk: whatever a pod's list and a query's name, a walk begins with the
// queried name, each of its names is one (or is said to be none), is the walk's
// base with a domain of the list, and two clients with equal lists walk alike.
func FuzzWalk(f *testing.F) {
	f.Add("db.prod.default.svc.cluster.local", "corp.example a.b", "default", 5, true)
	f.Add("www.example.com", "", "prod", 2, true)
	f.Add("a.b.svc.cluster.local", "svc.cluster.local cluster.local", "a", 15, false)
	f.Add(strings.Repeat("a.", 120)+"default.svc.cluster.local", strings.Repeat("b.", 60), "default", 5, false)
	f.Add(".", ".", "", -1, true)
	f.Add("A.DEFAULT.svc.Cluster.LOCAL", "Example.COM. example.com", "default", 0, true)
	f.Fuzz(func(t *testing.T, qname, searches, namespace string, ndots int, expand bool) {
		policy, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{"node.example"}, NDots: 5, Expand: expand})
		if err != nil {
			t.Fatal(err)
		}
		wire, err := WireName(qname)
		if err != nil {
			t.Skip("no name")
		}
		name := dnswire.AppendFolded(nil, wire)
		pod := Pod{Namespace: namespace, DNSPolicy: ClusterFirst, Searches: strings.Fields(searches), NDots: &ndots, Expand: expand}
		for _, list := range []*List{policy.ListOf(pod), policy.Infer(name)} {
			if list == nil {
				continue // unknown: no walk
			}
			if list.NDots < 0 || list.NDots > maxNDots {
				t.Errorf("ndots %d", list.NDots)
			}
			for how, plan := range map[string]func(*List, []byte) (Walk, bool){"collapse": Collapse, "listed": Listed, "expand": Expand} {
				w, ok := plan(list, name)
				if !ok {
					continue
				}
				first, ok := w.Candidate(nil, 0)
				if !ok || !bytes.Equal(first, name) {
					t.Errorf("%s of %q begins with %x", how, qname, first)
				}
				for i := range w.Len() {
					got, ok := w.Candidate(nil, i)
					if !ok {
						continue
					}
					if _, end, err := dns.UnpackDomainName(got, 0); err != nil || end != len(got) || end > dnswire.MaxNameLen {
						t.Errorf("%s of %q: candidate %d is no name: %x", how, qname, i, got)
					}
					if !bytes.HasPrefix(got, w.base) {
						t.Errorf("%s of %q: candidate %d has another base: %x", how, qname, i, got)
					}
				}
			}
		}
		if a, b := policy.ListOf(pod), policy.ListOf(pod); (a == nil) != (b == nil) || a != nil && a.ID() != b.ID() {
			t.Errorf("the lists of equal pods differ: %v, %v", a, b)
		}
	})
}
