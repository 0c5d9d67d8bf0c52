package resolver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestReloadOfLists: lists that were read off names follow the settings.
func TestReloadOfLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: zone{"a.b.node.example.": "A", "x.y.corp.example.": "A"}.answer(t)}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		if got := short(c.lookup("a.b.shop.svc.cluster.local.")); got != "NOERROR | a.b.shop.svc.cluster.local. CNAME a.b.node.example. | a.b.node.example. A 192.0.2.1" {
			t.Fatal(got)
		}
		settings := testSettings()
		withSearch(t, func(s *Search) {
			p, err := search.New(search.Config{ClusterDomain: "cluster.local", Domains: []string{"corp.example"}, NDots: 2})
			if err != nil {
				t.Fatal(err)
			}
			s.Policy = p
		})(&settings)
		if err := r.Reconfigure(f, settings); err != nil {
			t.Fatal(err)
		}
		if got := short(c.lookup("x.y.shop.svc.cluster.local.")); got != "NOERROR | x.y.shop.svc.cluster.local. CNAME x.y.corp.example. | x.y.corp.example. A 192.0.2.1" {
			t.Errorf("another domain of the node: %s", got)
		}
		if got := short(c.lookup("v.x.y.shop.svc.cluster.local.")); got != "NXDOMAIN" || f.count("v.x.y.svc.cluster.local. A") != 0 {
			t.Errorf("another ndots: %s, %v", got, f.asked)
		}
	})
}

// TestStaleWinnerOfTheOtherFamily: a stale answer is not made a fresh one where
// the other family's fresh one has decided the walk.
func TestStaleWinnerOfTheOtherFamily(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const winner, first = "a.b.svc.cluster.local.", "a.b.shop.svc.cluster.local."
		z, failing := zone{winner: "A AAAA"}, false
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			if failing && m.Question[0].Name == winner && m.Question[0].Qtype == dns.TypeA {
				m.Rcode = dns.RcodeServerFailure
				return nil
			}
			return z.answer(t)(ctx, m)
		}}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		lookupBoth(t, r, "10.0.0.1", winner)
		time.Sleep(time.Minute)
		failing = true
		c4, c6 := newClient(t, r, "10.0.0.1", UDP), newClient(t, r, "10.0.0.1", UDP)
		c6.ask(query(first, dns.TypeAAAA))
		time.Sleep(15 * time.Millisecond) // so A waits for what AAAA has under way
		c4.ask(query(first, dns.TypeA))
		<-c6.answers
		for range 2 {
			m := <-c4.answers
			if got := short(m); got != "NOERROR | "+first+" CNAME "+winner+" | "+winner+" A 192.0.2.1" || ede(m) != int(dns.ExtendedErrorCodeStaleAnswer) {
				t.Errorf("got %s, extended error %d; want the address, stale", got, ede(m))
			}
			c4.ask(query(first, dns.TypeA))
		}
		<-c4.answers
	})
}

// TestExpandIsNotForWalkers: where a namespace asks for expansion, clients that
// walk all the same find what they always would, at the usual cost. Here, the
// node's domain has any name that ends in .local.
func TestExpandIsNotForWalkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := zone{"api.node.example.": "A"}
		for _, d := range []string{"shop.svc.cluster.local", "svc.cluster.local", "cluster.local"} {
			z["api."+d+".node.example."] = "A AAAA"
		}
		f := &fakeForwarder{answer: z.answer(t)}
		r := newTestResolver(t, f, withSearch(t, expandShop))
		defer end(t, r)
		for _, d := range []string{"shop.svc.cluster.local.", "svc.cluster.local.", "cluster.local."} {
			if a, aaaa := lookupBoth(t, r, "10.0.0.1", "api."+d); a != "NXDOMAIN" || aaaa != "NXDOMAIN" {
				t.Errorf("api.%s: %s; %s", d, a, aaaa)
			}
		}
		if a, _ := lookupBoth(t, r, "10.0.0.1", "api.node.example."); a != "NOERROR | api.node.example. A 192.0.2.1" {
			t.Error(a)
		}
		if n := f.total(); n != 8 {
			t.Errorf("%d questions upstream, want 8: %v", n, f.asked)
		}
	})
}

// TestWalkTTLCap: where the operator keeps the cluster's denials for long, a walk's
// answer still comes to an end soon.
func TestWalkTTLCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := cache.New(cache.Config{Size: 8 << 20, Zones: []cache.Zone{{Name: ".", Positive: time.Hour, Negative: time.Hour, Stale: time.Hour}}})
		if err != nil {
			t.Fatal(err)
		}
		settings := testSettings()
		withSearch(t)(&settings)
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			err := zone{"a.b.": "A"}.answer(t)(ctx, m)
			for _, rr := range m.Ns { // the SOA record of a denial
				rr.Header().Ttl, rr.(*dns.SOA).Minttl = 3600, 3600
			}
			return err
		}}
		r, err := New(Config{Cache: c, Forwarder: f, Settings: settings})
		if err != nil {
			t.Fatal(err)
		}
		defer end(t, r)
		client := newClient(t, r, "10.0.0.1", UDP)
		for name, records := range map[string]int{"a.b.shop.svc.cluster.local.": 2, "x.y.shop.svc.cluster.local.": 1} {
			m := client.lookup(name)
			all := append(m.Answer, m.Ns...)
			if len(all) != records {
				t.Errorf("got %v, want %d records", m, records)
			}
			for _, rr := range all {
				if rr.Header().Name == "a.b." {
					continue // the winner's own, which the CNAME leads to for as long as it holds
				}
				if ttl := rr.Header().Ttl; ttl > 30 || ttl < 29 { // less what the walk took
					t.Errorf("%v: want 30 s", rr)
				}
			}
		}
	})
}

// TestWalksHoldAsLongAsTheirDenials: a walk that is asked for all the time is made
// once while its denials hold, here for two seconds, and is a hit else.
func TestWalksHoldAsLongAsTheirDenials(t *testing.T) {
	for name, z := range map[string]zone{"found": {"a.b.": "A"}, "nowhere": {}, "expanded": {"x.svc.cluster.local.": "A"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: z.answer(t)}, withSearch(t, expandShop))
				defer end(t, r)
				c := newClient(t, r, "10.0.0.1", UDP)
				waited := 0
				for range 200 {
					qname := "a.b.shop.svc.cluster.local."
					if name == "expanded" {
						qname = "x."
					}
					if c.ask(query(qname, dns.TypeA)) {
						waited++
					}
					<-c.answers
					time.Sleep(100 * time.Millisecond)
				}
				if waited > 11 {
					t.Errorf("%d walks in 20 s, want one in two", waited)
				}
			})
		})
	}
}

// TestWinnersArePrefetched: a name that walks lead to is renewed before it expires,
// though nobody asks for it by itself.
func TestWinnersArePrefetched(t *testing.T) {
	for _, prefetch := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeForwarder{answer: zone{"a.b.": "A AAAA"}.answer(t)}
			r := newTestResolver(t, f, withSearch(t), func(s *Settings) { s.Prefetch = prefetch })
			defer end(t, r)
			for range 299 { // seconds: the addresses are kept for 300
				lookupBoth(t, r, "10.0.0.1", "a.b.shop.svc.cluster.local.")
				time.Sleep(time.Second)
			}
			want := 1
			if prefetch {
				want = 2
			}
			for _, q := range []string{"a.b. A", "a.b. AAAA"} {
				if n := f.count(q); n != want {
					t.Errorf("prefetch %v: %s asked %d times in its life, want %d", prefetch, q, n, want)
				}
			}
		})
	}
}
