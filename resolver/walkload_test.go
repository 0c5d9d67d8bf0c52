package resolver

import (
	"cmp"
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// TestWalksUnderPressure: walks that have begun are finished, however many
// questions are in flight; those for which there is no room are refused at once,
// and may be asked again in the next moment.
func TestWalksUnderPressure(t *testing.T) {
	for name, tt := range map[string]struct {
		walks, questions int // asked at once, questions first
		limit            int // 0: 100
		before           int // walks among them that have been made before: their names are asked ahead
		answered         int // of the walks
	}{
		"room for all":              {walks: 50, answered: 50},
		"too many walks":            {walks: 100, answered: 50},
		"far too many":              {walks: 200, answered: 50},
		"questions first":           {walks: 50, questions: 60, answered: 20},
		"no room at all":            {walks: 10, questions: 100},
		"made before":               {walks: 50, before: 50, answered: 50},
		"made before, and too many": {walks: 100, before: 100, answered: 50},
		"a limit of one":            {walks: 3, limit: 1, answered: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				z := zone{}
				for i := range tt.walks {
					z[fmt.Sprintf("a%d.b.", i)] = "A"
				}
				f := &fakeForwarder{answer: z.answer(t)}
				limit := cmp.Or(tt.limit, 100)
				r := newTestResolver(t, f, withSearch(t), func(s *Settings) { s.Limits.InFlight, s.Limits.InFlightPerClient = limit, limit })
				defer end(t, r)
				c, others := newClient(t, r, "10.0.0.1", UDP), newClient(t, r, "10.0.0.2", UDP)
				walk := func(i int) string { return fmt.Sprintf("a%d.b.shop.svc.cluster.local.", i) }
				for i := range tt.before {
					if m := c.lookup(walk(i)); m.Rcode != dns.RcodeSuccess {
						t.Fatal(short(m))
					}
				}
				time.Sleep(time.Minute)
				for i := range tt.questions {
					others.ask(query(fmt.Sprintf("q%d.example.com.", i), dns.TypeA))
				}
				for i := range tt.walks {
					c.ask(query(walk(i), dns.TypeA))
				}
				answered := 0
				for range tt.walks {
					switch m := <-c.answers; {
					case tt.before > 0 && ede(m) == int(dns.ExtendedErrorCodeStaleAnswer): // no room, but it is known
					case m.Rcode == dns.RcodeSuccess && len(m.Answer) == 2:
						answered++
					case m.Rcode != dns.RcodeServerFailure:
						t.Errorf("got %s", short(m))
					}
				}
				if answered != tt.answered {
					t.Errorf("%d of %d walks answered, want %d", answered, tt.walks, tt.answered)
				}
				time.Sleep(100 * time.Millisecond) // questions end
				for i := range tt.walks {
					if m := c.lookup(walk(i)); m.Rcode != dns.RcodeSuccess {
						t.Fatalf("asked again, alone: %s", short(m))
					}
				}
				r.flights.mu.Lock()
				if r.flights.taken != 0 || r.flights.ahead != 0 {
					t.Errorf("%d still taken, %d ahead", r.flights.taken, r.flights.ahead)
				}
				r.flights.mu.Unlock()
			})
		})
	}
}

// TestStaleWinner: a walk that ends at a name whose address is stale is answered
// stale, as that name is, and each client is counted once.
func TestStaleWinner(t *testing.T) {
	for name, tt := range map[string]struct{ winner, answer string }{
		"the first name": {
			"a.b.shop.svc.cluster.local.", "NOERROR | a.b.shop.svc.cluster.local. A 192.0.2.1",
		},
		"the last": {
			"a.b.", "NOERROR | a.b.shop.svc.cluster.local. CNAME a.b. | a.b. A 192.0.2.1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				z := zone{tt.winner: "A"}
				f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error { return z.answer(t)(ctx, m) }}
				r := newTestResolver(t, f, withSearch(t))
				defer end(t, r)
				c := newClient(t, r, "10.0.0.1", UDP)
				const first = "a.b.shop.svc.cluster.local."
				c.lookup(first)
				time.Sleep(4 * time.Minute) // the walk's own answer is too old by now
				c.ask(query(tt.winner, dns.TypeA))
				<-c.answers
				time.Sleep(2 * time.Minute)
				if tt.winner == "a.b." {
					time.Sleep(4 * time.Minute)
				}
				z[tt.winner] = "fails"
				for i := range 3 {
					c.ask(query(first, dns.TypeA))
					c.ask(query(first, dns.TypeA))
					for range 2 {
						m := <-c.answers
						if got := short(m); got != tt.answer || ede(m) != int(dns.ExtendedErrorCodeStaleAnswer) {
							t.Errorf("got %s, extended error %d; want %s, stale", got, ede(m), tt.answer)
						}
						for _, rr := range m.Answer {
							if ttl := rr.Header().Ttl; ttl != 30 {
								t.Errorf("TTL %d, want 30", ttl)
							}
						}
					}
					if n := r.Stats().Hits[HitStale] + hitsOf(c); n != uint64(2*(i+1)) {
						t.Errorf("%d stale answers counted, want %d", n, 2*(i+1))
					}
				}
			})
		})
	}
}

// hitsOf returns the stale hits that were counted for a client without a socket.
func hitsOf(c *client) uint64 { return c.s.c.hits[HitStale].Load() }

// TestWalkAllocatesNothing: a hit that looks at the client's list first allocates
// no more than others, whatever is known of the name.
func TestWalkAllocatesNothing(t *testing.T) {
	for name, qname := range map[string]string{
		"a walk's answer":     "a.b.shop.svc.cluster.local.",
		"a walk's denial":     "x.y.shop.svc.cluster.local.",
		"a step":              "x.y.svc.cluster.local.",
		"a name of many dots": "a.b.c.d.e.f.g.shop.svc.cluster.local.",
		"a denial":            "x.",
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error { return zone{"a.b.": "A"}.answer(t)(ctx, m) }}
			r := newTestResolver(t, f, withSearch(t))
			c := newClient(t, r, "10.0.0.1", UDP)
			c.lookup("x.y.shop.svc.cluster.local.")
			c.lookup(qname)
			packed, err := query(qname, dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			now, buf := r.cache.Now(), make([]byte, 0, 1500)
			if n := testing.AllocsPerRun(1000, func() {
				if _, waits := r.answer(c.s, packed, false, &c.src, now, buf); waits {
					t.Fatal("no hit")
				}
			}); n != 0 && !raced {
				t.Errorf("%v allocations per hit, want 0", n)
			}
		})
	}
}
