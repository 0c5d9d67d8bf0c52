package resolver

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

func TestExplain(t *testing.T) {
	z := zone{
		"web.shop.svc.cluster.local.": "A", "web-3.web.node.example.": "A", "web-3.mail.node.example.": "A",
		"api.example.com.": "A", "db.svc.cluster.local.": "nothing", "bad.svc.cluster.local.": "fails",
	}
	tests := map[string]struct {
		name, client, namespace string
		source                  string
		steps                   string // names, their states and what follows
		answer                  string // rcode and the last record's first octets
		walked                  bool
		note                    string
	}{
		"a pod's look-up": {
			name: "api.example.com", client: "10.0.0.1", source: "pod", walked: true,
			steps: "api.example.com.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.node.example. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com. data NODATA the look-up ends here",
			answer: "NOERROR api.example.com. 30 IN A 192.0.2.1",
		},
		"a namespace's": {
			name: "bad.svc", namespace: "shop", source: "namespace", walked: true,
			steps: "bad.svc.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"bad.svc.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"bad.svc.cluster.local. failure failure the look-up fails here",
			answer: "SERVFAIL",
		},
		"an absolute name": {
			name: "api.example.com.", client: "10.0.0.1", source: "pod",
			steps:  "api.example.com. data NODATA the look-up ends here",
			answer: "NOERROR api.example.com. 300 IN A 192.0.2.1",
		},
		"a step of an unknown client": {
			name: "api.example.com.shop.svc.cluster.local", client: "10.9.9.9", source: "inferred", walked: true,
			steps: "api.example.com.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com.node.example. NXDOMAIN NXDOMAIN not here; " +
				"api.example.com. data NODATA the look-up ends here",
			answer: "NOERROR api.example.com. 30 IN A 192.0.2.1",
		},
		"a pod that is away": {
			name: "web-3.web.shop.svc.cluster.local.", client: "10.0.0.1", source: "pod",
			steps: "web-3.web.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.web.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.web.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.web.node.example. data NODATA the look-up ends here",
			answer: "NXDOMAIN", note: "web.shop.svc.cluster.local. exists, and the first name may be a pod of it: a walk that leaves the cluster is left to the client",
		},
		"a host of the node's domain": {
			name: "web-3.mail", client: "10.0.0.1", source: "pod", walked: true,
			steps: "web-3.mail.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.mail.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.mail.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"web-3.mail.node.example. data NODATA the look-up ends here",
			answer: "NOERROR web-3.mail.node.example. 30 IN A 192.0.2.1",
		},
		"nowhere": {
			name: "a.b.c", client: "10.0.0.1", source: "pod",
			steps: "a.b.c.shop.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"a.b.c.svc.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"a.b.c.cluster.local. NXDOMAIN NXDOMAIN not here; " +
				"a.b.c.node.example. NXDOMAIN NXDOMAIN not here; " +
				"a.b.c. NXDOMAIN NXDOMAIN not here",
			answer: "NXDOMAIN",
		},
		"nobody's": {
			name: "nowhere.example", source: "none",
			steps: "nowhere.example. NXDOMAIN NXDOMAIN not here", answer: "NXDOMAIN",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: z.answer(t)}, withSearch(t, func(s *Search) {
					s.Client = func(a netip.Addr) (*search.List, bool) {
						return s.Policy.ListOf(search.Pod{Namespace: "shop"}), a.String() == "10.0.0.1"
					}
				}))
				defer end(t, r)
				client, _ := netip.ParseAddr(tt.client)
				for _, cached := range []bool{false, true} {
					x, err := r.Explain(t.Context(), tt.name, "a", client, tt.namespace)
					if err != nil {
						t.Fatal(err)
					}
					var steps []string
					for _, s := range x.Steps {
						line := s.Name
						for _, state := range s.States {
							line += " " + strings.Split(state.State, ":")[0]
							if state.Cached != cached {
								t.Errorf("%s %s: cached %v, want %v", s.Name, state.Type, state.Cached, cached)
							}
						}
						steps = append(steps, line+" "+s.Step)
					}
					if got := strings.Join(steps, "; "); got != tt.steps {
						t.Errorf("steps\n%s\nwant\n%s", got, tt.steps)
					}
					answer := x.Rcode
					if n := len(x.Answer); n > 0 {
						answer += " " + x.Answer[n-1]
					}
					if got := strings.Join(x.Notes, "; "); got != tt.note {
						t.Errorf("notes %q, want %q", got, tt.note)
					}
					if answer != tt.answer || x.Source != tt.source || x.Walked != tt.walked {
						t.Errorf("answer %q, list from %q, walked %v; want %q, %q, %v", answer, x.Source, x.Walked, tt.answer, tt.source, tt.walked)
					}
				}
			})
		})
	}
}

func TestExplainErrors(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, withSearch(t))
	for name, args := range map[string][3]string{"no such type": {"a.example", "AX"}, "no name": {"a..example", "A"}, "no namespace": {"a.example", "A", "a.b"}} {
		if _, err := r.Explain(t.Context(), args[0], args[1], netip.Addr{}, args[2]); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	plain := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	if _, err := plain.Explain(t.Context(), "a.example", dns.TypeToString[dns.TypeA], netip.Addr{}, ""); err == nil {
		t.Error("no error without search lists")
	}
}

// TestExplainNodeDomains: where the node's domains are not known, a list of the
// cluster may lack some.
func TestExplainNodeDomains(t *testing.T) {
	for name, tt := range map[string]struct {
		domains []string
		pod     search.Pod
		noted   bool
	}{
		"unknown":              {nil, search.Pod{Namespace: "shop"}, true},
		"known":                {[]string{"node.example"}, search.Pod{Namespace: "shop"}, false},
		"a list of its own":    {nil, search.Pod{Namespace: "shop", DNSPolicy: search.None, Searches: []string{"own.example"}}, false},
		"no list, so no doubt": {nil, search.Pod{Namespace: "shop", HostNetwork: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, withSearch(t, func(s *Search) {
				p, err := search.New(search.Config{ClusterDomain: "cluster.local", Domains: tt.domains, NDots: 5})
				if err != nil {
					t.Fatal(err)
				}
				s.Policy = p
				s.Client = func(netip.Addr) (*search.List, bool) { return p.ListOf(tt.pod), true }
			}))
			x, err := r.Explain(t.Context(), "a.example", "A", netip.MustParseAddr("10.0.0.1"), "")
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Contains(strings.Join(x.Notes, " "), "search.domains is empty"); got != tt.noted {
				t.Errorf("notes %q", x.Notes)
			}
		})
	}
}

// TestExplainCountsNothing: what nobody asked is nobody's query, and no answer to
// one either, also where it waits in a flight.
func TestExplainCountsNothing(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 0)}, withSearch(t))
	if _, err := r.Explain(t.Context(), "a.example.", "A", netip.Addr{}, ""); err != nil {
		t.Fatal(err)
	}
	s := r.Stats()
	if s.Queries != [numTransports]uint64{} || s.Responses != [NumRcodes]uint64{} || sum(s.Duration.Counts) != 0 {
		t.Errorf("stats %+v", s)
	}
}

// TestExtendedErrorText: an extended error without a text is told by what its code
// means.
func TestExtendedErrorText(t *testing.T) {
	for want, e := range map[string]dns.EDNS0_EDE{
		"3 Stale Answer":  {InfoCode: dns.ExtendedErrorCodeStaleAnswer},
		"22 nobody there": {InfoCode: dns.ExtendedErrorCodeNoReachableAuthority, ExtraText: "nobody there"},
		"65000":           {InfoCode: 65000},
	} {
		if got := extendedError(&e); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
