package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// lookupBoth asks for A and AAAA at once and returns the answers in short.
func lookupBoth(t *testing.T, r *Resolver, client, name string) (a, aaaa string) {
	t.Helper()
	c4, c6 := newClient(t, r, client, UDP), newClient(t, r, client, UDP)
	c4.ask(query(name, dns.TypeA))
	c6.ask(query(name, dns.TypeAAAA))
	return short(<-c4.answers), short(<-c6.answers)
}

// TestStepsAreHits: when a name exists nowhere, the client goes through its whole
// list, and asks nothing that the walk has not asked.
func TestStepsAreHits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: zone{}.answer(t)}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		for _, domain := range []string{".shop.svc.cluster.local.", ".svc.cluster.local.", ".cluster.local.", ".node.example.", "."} {
			if a, aaaa := lookupBoth(t, r, "10.0.0.1", "api.example.com"+domain); a != "NXDOMAIN" || aaaa != "NXDOMAIN" {
				t.Errorf("%s: %s, %s", domain, a, aaaa)
			}
		}
		// Five names, and the last of both families.
		if n := f.total(); n != 6 {
			t.Errorf("%d questions upstream, want 6: %v", n, f.asked)
		}
	})
}

// TestStepsAreNoWalks: a step that looks like the first of another search is
// not taken for it.
func TestStepsAreNoWalks(t *testing.T) {
	tests := map[string]struct {
		known bool
		asked []string
	}{
		"unknown client, any last label may be a namespace": {asked: []string{"www.shop.example.uk.dev.svc.cluster.local.", "www.shop.example.uk.svc.cluster.local."}},
		"as many dots as ndots":                             {asked: []string{"a.www.shop.of.example.uk.dev.svc.cluster.local.", "a.www.shop.of.example.uk.svc.cluster.local."}},
		"known client, its own namespace":                   {known: true, asked: []string{"www.shop.example.dev.dev.svc.cluster.local.", "www.shop.example.dev.svc.cluster.local."}},
		"known client, svc.ns.svc":                          {known: true, asked: []string{"web-0.web.dev.svc.dev.svc.cluster.local.", "web-0.web.dev.svc.svc.cluster.local.", "web-0.web.dev.svc.cluster.local."}},
	}
	// What would be found by taking the last step for a first one.
	z := zone{"www.shop.example.": "A", "a.www.shop.of.example.": "A", "web-0.web.": "A"}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: z.answer(t)}
				r := newTestResolver(t, f, withSearch(t, func(s *Search) {
					s.Client = func(netip.Addr) (*search.List, bool) {
						return s.Policy.ListOf(search.Pod{Namespace: "dev"}), tt.known
					}
				}))
				defer end(t, r)
				for range 2 {
					for _, name := range tt.asked {
						if a, aaaa := lookupBoth(t, r, "10.0.0.1", name); a != "NXDOMAIN" || aaaa != "NXDOMAIN" {
							t.Errorf("%s: %s, %s", name, a, aaaa)
						}
					}
				}
				// Long after, it is a first step again.
				time.Sleep(leftFor)
				last := tt.asked[len(tt.asked)-1]
				if a, _ := lookupBoth(t, r, "10.0.0.1", last); !strings.Contains(a, "CNAME") {
					t.Errorf("%s: %s, want a walk", last, a)
				}
			})
		})
	}
}

// TestWalkFamilies: what becomes of a walk where the two families of a name
// disagree, in whichever order they are asked.
func TestWalkFamilies(t *testing.T) {
	const (
		name   = "a.b.shop.svc.cluster.local."
		middle = "a.b.cluster.local."
		v4     = "NOERROR | a.b.shop.svc.cluster.local. CNAME a.b. | a.b. A 192.0.2.1"
		v6     = "NOERROR | a.b.shop.svc.cluster.local. CNAME a.b. | a.b. AAAA 2001:db8::1"
		v4here = "NOERROR | a.b.shop.svc.cluster.local. CNAME a.b.cluster.local. | a.b.cluster.local. A 192.0.2.1"
	)
	servfail := func(_ context.Context, m *dns.Msg) error {
		m.Rcode = dns.RcodeServerFailure
		return nil
	}
	silent := func(ctx context.Context, _ *dns.Msg) error {
		select {
		case <-time.After(1500 * time.Millisecond):
		case <-ctx.Done():
		}
		return errors.New("no answer")
	}
	tests := map[string]struct {
		zone    zone
		qtype   uint16 // of middle; not answered from the zone
		answer  func(context.Context, *dns.Msg) error
		a, aaaa string
		within  time.Duration // until A is answered
	}{
		"denied for A, AAAA fails":     {zone{"a.b.": "A AAAA"}, dns.TypeAAAA, servfail, v4, v6, 100 * time.Millisecond},
		"denied for AAAA, A fails":     {zone{"a.b.": "A AAAA"}, dns.TypeA, servfail, v4, v6, 100 * time.Millisecond},
		"A here, AAAA fails":           {zone{"a.b.": "A AAAA", middle: "A"}, dns.TypeAAAA, servfail, v4here, "SERVFAIL", 100 * time.Millisecond},
		"A here, AAAA is not answered": {zone{"a.b.": "A AAAA", middle: "A"}, dns.TypeAAAA, silent, v4here, "SERVFAIL", 100*time.Millisecond + patience},
	}
	for desc, tt := range tests {
		for _, order := range [][2]uint16{{dns.TypeA, dns.TypeAAAA}, {dns.TypeAAAA, dns.TypeA}} {
			t.Run(fmt.Sprintf("%s, %s first", desc, dns.TypeToString[order[0]]), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
						if q := m.Question[0]; q.Name == middle && q.Qtype == tt.qtype {
							return tt.answer(ctx, m)
						}
						return tt.zone.answer(t)(ctx, m)
					}}
					r := newTestResolver(t, f, withSearch(t))
					defer end(t, r)
					start := time.Now()
					clients := map[uint16]*client{}
					for _, qtype := range order {
						clients[qtype] = newClient(t, r, "10.0.0.1", UDP)
						clients[qtype].ask(query(name, qtype))
						synctest.Wait()
					}
					if got := short(<-clients[dns.TypeA].answers); got != tt.a {
						t.Errorf("A: %s", got)
					}
					if d := time.Since(start); d > tt.within {
						t.Errorf("A took %v", d)
					}
					if got := short(<-clients[dns.TypeAAAA].answers); got != tt.aaaa {
						t.Errorf("AAAA: %s", got)
					}
				})
			})
		}
	}
}

// TestWalkTTLZero: a winner that must not be cached is asked once a walk, the
// first time and when it is asked ahead.
func TestWalkTTLZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			if err := (zone{"a.b.": "A AAAA"}).answer(t)(ctx, m); err != nil {
				return err
			}
			for _, r := range m.Answer {
				r.Header().Ttl = 0
			}
			return nil
		}}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		const name = "a.b.shop.svc.cluster.local."
		for i := range 3 {
			before := f.total()
			if a, aaaa := lookupBoth(t, r, "10.0.0.1", name); !strings.Contains(a, "A 192.0.2.1") || !strings.Contains(aaaa, "AAAA 2001:db8::1") {
				t.Errorf("%s, %s", a, aaaa)
			}
			want := 2 // what is not cached
			if i == 0 {
				want = 7 // five names, the last of both families, and the Service b
			}
			if n := f.total() - before; n != want {
				t.Errorf("walk %d: %d questions upstream, want %d", i, n, want)
			}
		}
	})
}
