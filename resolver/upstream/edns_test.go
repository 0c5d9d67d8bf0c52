package upstream

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// A server that answers every question by an error that may be about the OPT
// record is not asked all of them both ways: the offered load stays what it is.
// (It was 2.0 times the load.) What it answers again is had at once, and with OPT
// once that is due.
func TestChokesOnEverything(t *testing.T) {
	for name, rcode := range map[string]int{"formerr": dns.RcodeFormatError, "notimp": dns.RcodeNotImplemented} {
		for _, rate := range []struct {
			questions int
			interval  time.Duration
		}{{5000, ms}, {2000, 400 * ms}, {200, 5 * time.Second}, {100, time.Minute}} {
			t.Run(fmt.Sprintf("%s, one every %v", name, rate.interval), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNet(t, healthy(ms))
					f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
					load(t, f, 100, 10*ms)
					n.become(addr(1), func(q *fakeQuery) { q.reply(20*ms, q.rcode(rcode)) })
					before := len(n.queries())
					answered, slowest := load(t, f, rate.questions, rate.interval)
					sent := len(n.queries()) - before
					t.Logf("%d sent for %d questions, %.3f times as many, slowest answer %v", sent, rate.questions, float64(sent)/float64(rate.questions), slowest)
					if answered < rate.questions { // the error is the answer
						t.Errorf("%d of %d answered", answered, rate.questions)
					}
					if limit := max(rate.questions*11/10+savings, rate.questions+allowance) + ednsSuspicion; sent > limit {
						t.Errorf("%d sent for %d questions, want %d", sent, rate.questions, limit)
					}
					n.become(addr(1), healthy(ms))
					if answered, slowest := load(t, f, 100, 10*ms); answered < 100 || slowest > ms {
						t.Errorf("%d of 100 answered after the recovery, slowest %v", answered, slowest)
					}
					time.Sleep(ednsRetry)
					before = len(n.queries())
					if load(t, f, 10, ms); len(n.queries())-before != 10 || !f.Stats().Paths[UDP].EDNS {
						t.Errorf("%d sent for 10 questions, with OPT %v", len(n.queries())-before, f.Stats().Paths[UDP].EDNS)
					}
				})
			})
		}
	}
}

// A server that has such an error for one name alone, and takes OPT records
// otherwise, goes on to get them.
func TestChokesOnAName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const odd = "odd.example."
		n := newFakeNet(t, func(q *fakeQuery) {
			if q.Question[0].Name == odd {
				q.reply(ms, q.rcode(dns.RcodeFormatError))
				return
			}
			q.reply(ms, q.good())
		})
		f := n.forwarder(Config{Budget: usual})
		for range 20 {
			if _, err := f.Exchange(t.Context(), query(odd)); err != nil {
				t.Error(err)
			}
			load(t, f, 1, time.Second)
		}
		for _, q := range n.queries() {
			if q.IsEdns0() == nil && q.Question[0].Name != odd {
				t.Fatal("OPT left out")
			}
		}
	})
}

// Names whose own servers refuse OPT records, behind a forwarder that takes them, are
// had without, and such as are refused either way not at all; all others are asked with
// OPT as before, also if there are many such.
func TestDomainWithoutEDNS(t *testing.T) {
	for name, always := range map[string]bool{"with OPT only": false, "with and without OPT": true} {
		t.Run(name, func(t *testing.T) { testDomainWithoutEDNS(t, always) })
	}
}

func testDomainWithoutEDNS(t *testing.T, always bool) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		odd := func(q *dns.Msg) bool { return dns.IsSubDomain("odd.example.", q.Question[0].Name) }
		n := newFakeNet(t, func(q *fakeQuery) {
			if odd(q.Msg) && (always || q.IsEdns0() != nil) {
				q.reply(ms, q.rcode(dns.RcodeFormatError))
				return
			}
			q.reply(ms, q.good())
		})
		f := n.forwarder(Config{Budget: usual})
		for i := range 50 {
			load(t, f, 1, time.Second)
			for j := range 2 * ednsSuspicion {
				q := query(fmt.Sprintf("n%d-%d.odd.example.", i, j))
				ans, err := f.Exchange(t.Context(), q)
				if err != nil {
					t.Fatal(err)
				}
				if !always {
					checkAnswer(t, q, ans)
				}
			}
		}
		for _, q := range n.queries() {
			if q.IsEdns0() == nil && !odd(q.Msg) {
				t.Fatal("OPT left out")
			}
		}
	})
}

// A server that takes OPT records no more is found out in ednsTrust: until then it
// is asked twice, and everybody is answered.
func TestTakesOPTNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms))
		f := n.forwarder(Config{Budget: usual})
		load(t, f, 100, 10*ms)
		n.become(addr(1), chokingOn(dns.RcodeFormatError))
		const questions = 100
		if answered, _ := load(t, f, questions, ednsTrust/questions); answered < questions {
			t.Errorf("%d of %d answered", answered, questions)
		}
		time.Sleep(time.Second)
		load(t, f, 1, 0)
		before := len(n.queries())
		if answered, _ := load(t, f, questions, 10*ms); answered < questions {
			t.Errorf("%d of %d answered", answered, questions)
		}
		if sent := len(n.queries()) - before; sent != questions {
			t.Errorf("%d sent for %d questions", sent, questions)
		}
	})
}

// An error about the OPT record is no answer while the question is under way to the same
// server without one: neither a hedge's, that had one as well, nor the next server's.
func TestChokesOnSecondQuestions(t *testing.T) {
	choking := func(after time.Duration, plain func(*fakeQuery)) func(*fakeQuery) {
		return func(q *fakeQuery) {
			if q.IsEdns0() != nil {
				q.reply(after, q.rcode(dns.RcodeFormatError))
				return
			}
			plain(q)
		}
	}
	for name, tt := range map[string]struct {
		servers []func(*fakeQuery)
		took    time.Duration
		sent    int // the hedge among them
	}{
		"hedge":       {[]func(*fakeQuery){choking(300*ms, healthy(300*ms))}, 600 * ms, 3},
		"next server": {[]func(*fakeQuery){choking(800*ms, blackHole), choking(200*ms, healthy(300*ms))}, defaultRetry + 500*ms, 5},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(ms))
				for i := range tt.servers[1:] {
					n.become(addr(i+2), healthy(ms))
				}
				f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				load(t, f, 100, 10*ms)
				for i, script := range tt.servers {
					n.become(addr(i+1), script)
				}
				before := len(n.queries())
				q, start := query("slow.example."), time.Now()
				ans, err := f.Exchange(t.Context(), q)
				if err != nil {
					t.Fatal(err)
				}
				checkAnswer(t, q, ans)
				if took := time.Since(start); ans.Response.Rcode != 0 || took != tt.took {
					t.Errorf("rcode %d after %v, want 0 after %v", ans.Response.Rcode, took, tt.took)
				}
				if sent := len(n.queries()) - before; sent != tt.sent {
					t.Errorf("%d sent, want %d", sent, tt.sent)
				}
			})
		})
	}
}

// A server that refuses OPT records, and takes its time without, is alive: neither is
// what the next server denies believed, nor is it passed over. What it says without OPT
// is its word: names that are none of its own are denied at once.
func TestChokingServerIsAsked(t *testing.T) {
	slow := func(q *fakeQuery) {
		switch {
		case q.IsEdns0() != nil:
			q.reply(ms, q.rcode(dns.RcodeFormatError))
		case q.Question[0].Name == "internal.example.":
			q.reply(900*ms, q.good())
		case q.Question[0].Name == "public.example.":
			q.reply(ms, q.rcode(dns.RcodeRefused))
		case dns.IsSubDomain("dead.example.", q.Question[0].Name):
			q.reply(ms, q.rcode(dns.RcodeServerFailure))
		default:
			q.reply(ms, q.good())
		}
	}
	for name, before := range map[string]int{"from the start": 0, "trusted with them": 100} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(ms), denying)
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				f := n.forwarder(config)
				load(t, f, before, 10*ms)
				n.become(addr(1), slow)
				internal := func() {
					t.Helper()
					start, q := time.Now(), query("internal.example.")
					ans, err := f.Exchange(t.Context(), q)
					if err != nil {
						t.Fatal(err)
					}
					checkAnswer(t, q, ans)
					if took := time.Since(start); ans.Server != addr(1) || took > 901*ms {
						t.Errorf("%v answered after %v", ans.Server, took)
					}
				}
				internal()
				start := time.Now()
				ans, err := f.Exchange(t.Context(), query("public.example."))
				if err != nil || ans.Response.Rcode != dnswire.RcodeNXDomain || time.Since(start) > 5*ms {
					t.Errorf("a public name: rcode %d, %v, after %v; want NXDOMAIN at once", ans.Response.Rcode, err, time.Since(start))
				}
				for i := range 2 * maxStrikes { // the next server has an answer to these
					if _, err := f.Exchange(t.Context(), query(fmt.Sprintf("n%d.dead.example.", i))); err != nil {
						t.Error(err)
					}
					time.Sleep(time.Second)
				}
				internal()
				if len(health()) > 0 {
					t.Errorf("health %v", health())
				}
			})
		})
	}
}
