package upstream

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// inTurn returns a script that deals with one query in so many by the odd script.
func inTurn(nth int, odd, script func(*fakeQuery)) func(*fakeQuery) {
	n := 0
	return func(q *fakeQuery) {
		if n++; n%nth == 0 {
			odd(q)
			return
		}
		script(q)
	}
}

// refused returns a script of a rule that rejects queries, or of a port that nobody
// listens at, with so many octets of the query in the ICMP errors.
func refused(after time.Duration, quoted int) func(*fakeQuery) {
	return func(q *fakeQuery) { q.icmp(after, quoted) }
}

// A server that answers when nobody waits any more is as good as dead: the next
// one gets the questions, and late answers do not keep it up or bring it up.
func TestTooLate(t *testing.T) {
	for _, interval := range []time.Duration{5 * ms, 50 * ms, 500 * ms} {
		t.Run(fmt.Sprintf("one every %v", interval), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(ms), healthy(ms))
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				f := n.forwarder(config)
				load(t, f, 100, 10*ms)
				n.become(addr(1), healthy(1600*ms))
				const questions = 600
				answered, slowest := load(t, f, questions, interval)
				t.Logf("%d of %d answered, slowest %v, %d and %d sent, health %v", answered, questions, slowest,
					n.count(addr(1), "udp"), n.count(addr(2), "udp"), health())
				if answered < questions {
					t.Errorf("%d of %d answered", answered, questions)
				}
				if got := health(); len(got) != 1 || got[0].Up {
					t.Errorf("health %v, want the first server down", got)
				}
				n.become(addr(1), healthy(ms))
				load(t, f, 200, time.Second)
				if got := health(); len(got) != 2 || !got[1].Up {
					t.Errorf("health %v, want the first server up again", got)
				}
			})
		})
	}
}

// Long answers come from the next server where the first one's TCP does not
// work: each gets the question once, and so all are answered.
func TestLongAnswersElsewhere(t *testing.T) {
	for name, tcp := range map[string]func(*fakeQuery){"silent": blackHole, "refusing": refusing} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, byTransport(cutShort, tcp), byTransport(cutShort, healthy(ms)))
				f := n.forwarder(Config{Budget: usual})
				load(t, f, 5, 3*time.Second)
				if f.Stats().Paths[TCP].Up {
					t.Fatal("TCP of the first server counts as up")
				}
				const questions = 500
				udp, next := n.count(addr(1), "udp"), n.count(addr(2), "tcp")
				answered, slowest := load(t, f, questions, 20*ms)
				udp, next = n.count(addr(1), "udp")-udp, n.count(addr(2), "tcp")-next
				t.Logf("%d answered, slowest %v, %d and %d sent", answered, slowest, udp, next)
				if answered < questions || udp > questions*11/10 || next > questions*11/10 {
					t.Errorf("%d of %d answered, %d and %d sent", answered, questions, udp, next)
				}
			})
		})
	}
}

// A rule that rejects one packet in five at 500 a second, 50 under way. The
// questions that are rejected fail, and no others: they are asked of the next
// server, or again as far as the budget goes. (As long as it was not known whose
// question an ICMP error is about, the server received 1.9 times as many as were
// asked, or the next one 0.9 times; and half of them were answered.) Errors that do
// not quote the question still cost more.
func TestSomeRejected(t *testing.T) {
	const questions = 2000
	for name, tt := range map[string]struct {
		servers, quoted int
		answered        int // at least
		sent, next      int // at most; what was rejected included
	}{
		"alone":                          {servers: 1, quoted: quotedLen, answered: questions * 86 / 100, sent: questions*11/10 + savings},
		"before another":                 {servers: 2, quoted: quotedLen, answered: questions, sent: questions * 102 / 100, next: questions * 22 / 100},
		"alone, nothing quoted":          {servers: 1, quoted: 0, answered: questions * 2 / 5, sent: questions * 3},
		"before another, nothing quoted": {servers: 2, quoted: 0, answered: questions, sent: questions * 11 / 10, next: questions},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(100*ms), healthy(ms))
				var to []Server
				for i := range tt.servers {
					to = append(to, Server{Addr: addr(i + 1)})
				}
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Servers: to, Protocol: UDPOnly}}})
				f := n.forwarder(config)
				load(t, f, 100, 10*ms)
				n.become(addr(1), inTurn(5, refused(10*ms, tt.quoted), healthy(100*ms)))
				received, before := n.count(addr(1), "udp"), len(n.queries())
				answered, slowest := load(t, f, questions, 2*ms)
				received, next := n.count(addr(1), "udp")-received, n.count(addr(2), "udp")
				sent := len(n.queries()) - before - next
				t.Logf("%d answered, slowest %v, %d sent and %d received, %d by the next server, %d sockets, health %v",
					answered, slowest, sent, received, next, f.Stats().Paths[UDP].Opened, health())
				if answered < tt.answered || tt.servers == 2 && slowest >= defaultRetry {
					t.Errorf("%d of %d answered, slowest %v", answered, questions, slowest)
				}
				if sent > tt.sent || next > tt.next {
					t.Errorf("%d and %d sent for %d questions, want %d and %d", sent, next, questions, tt.sent, tt.next)
				}
				if tt.quoted > 0 && received > questions {
					t.Errorf("%d received of %d questions", received, questions)
				}
				if got := health(); len(got) > 0 {
					t.Errorf("health %v", got)
				}
			})
		})
	}
}

// Behind one address there may be several endpoints: while one listens it is not
// down, though three questions, and three sockets more, led to those that do not.
func TestSomeEndpointsRefuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms))
		config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		f := n.forwarder(config)
		load(t, f, 1, 0)
		time.Sleep(time.Minute) // no socket is left
		refusals := 0
		n.become(addr(1), func(q *fakeQuery) {
			if refusals++; refusals <= 3*(1+maxResends)+maxConfirmations+2 {
				q.icmp(0, quotedLen)
				return
			}
			q.reply(ms, q.good())
		})
		answered, _ := load(t, f, 3, time.Second)
		if answered > 0 {
			t.Fatalf("%d questions answered that should have met refusals", answered)
		}
		if got := health(); len(got) > 0 {
			t.Errorf("a server with an endpoint that answers is told to be down: %v", got)
		}
		if answered, _ := load(t, f, 100, 10*ms); answered < 100 {
			t.Errorf("%d of 100 answered afterwards", answered)
		}
	})
}

// A server that comes back, but drops queries with OPT, is tried without.
func TestComesBackDroppingOPT(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms), healthy(ms))
		f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		load(t, f, 100, 100*ms)
		n.become(addr(1), blackHole)
		load(t, f, 100, time.Second)
		n.become(addr(1), func(q *fakeQuery) {
			if q.IsEdns0() == nil {
				q.reply(ms, q.good())
			}
		})
		load(t, f, 600, time.Second)
		before := n.count(addr(2), "udp")
		answered, slowest := load(t, f, 100, 100*ms)
		if second := n.count(addr(2), "udp") - before; answered < 100 || slowest > ms || second > 0 {
			t.Errorf("%d of 100 answered, slowest %v, %d by the second server", answered, slowest, second)
		}
	})
}

// What drops queries with an OPT record may come between later: it is found out
// about while nothing else is answered, and so is a server that comes back so.
func TestBeginsToDropOPT(t *testing.T) {
	for _, rtt := range []time.Duration{ms, 100 * ms, 160 * ms, 250 * ms, 300 * ms} {
		for name, absent := range map[string]time.Duration{"at work": 0, "after an absence": 5 * time.Minute} {
			t.Run(fmt.Sprintf("%s, %v away", name, rtt), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNet(t, healthy(rtt))
					f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
					load(t, f, 400, 100*ms)
					if absent > 0 {
						n.become(addr(1), blackHole)
						load(t, f, int(absent/time.Second), time.Second)
					}
					n.become(addr(1), func(q *fakeQuery) {
						if q.IsEdns0() == nil {
							q.reply(rtt, q.good())
						}
					})
					const questions = 600
					before := n.count(addr(1), "udp")
					answered, _ := load(t, f, questions, 500*ms)
					sent := n.count(addr(1), "udp") - before
					t.Logf("%d of %d answered, %d sent", answered, questions, sent)
					if answered < questions*3/4 {
						t.Errorf("%d of %d answered", answered, questions)
					}
					if sent > questions*11/10+savings {
						t.Errorf("%d sent for %d questions", sent, questions)
					}
					if f.Stats().Paths[UDP].EDNS {
						t.Error("Stats say that OPT is sent")
					}
				})
			})
		}
	}
}
