package upstream

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// load asks n questions, one every interval, each for another name, and returns
// how many were answered and the slowest answer.
func load(t *testing.T, f *Forwarder, n int, interval time.Duration) (answered int, slowest time.Duration) {
	t.Helper()
	return loadFor(t, f, n, interval, 1500*ms)
}

// loadFor is load for another Timeouts.Total.
func loadFor(t *testing.T, f *Forwarder, n int, interval, total time.Duration) (answered int, slowest time.Duration) {
	t.Helper()
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for i := range n {
		wg.Go(func() {
			start := time.Now()
			_, err := f.Exchange(t.Context(), query(fmt.Sprintf("n%d.example.", i)))
			took := time.Since(start)
			if took > total {
				t.Errorf("exchange took %v", took)
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				answered++
				slowest = max(slowest, took)
			}
		})
		time.Sleep(interval)
	}
	wg.Wait()
	return answered, slowest
}

// endpoints returns a script of a ClusterIP: each socket leads to one of the
// endpoints for its life, by a throw of dice.
func endpoints(dice *rand.Rand, scripts ...func(*fakeQuery)) func(*fakeQuery) {
	chosen := make(map[*fakeConn]int)
	return func(q *fakeQuery) {
		i, ok := chosen[q.conn]
		if !ok {
			i = dice.IntN(len(scripts))
			chosen[q.conn] = i
		}
		scripts[i](q)
	}
}

func dropping(dice *rand.Rand, percent int, script func(*fakeQuery)) func(*fakeQuery) {
	return func(q *fakeQuery) {
		if dice.IntN(100) >= percent {
			script(q)
		}
	}
}

// TestOfferedLoad is promise 5: whatever is wrong with an upstream, it is never
// asked more than 1.1 times as much as the clients ask.
func TestOfferedLoad(t *testing.T) {
	const questions = 2000
	dice := rand.New(rand.NewPCG(1, 2))
	jittery := func(q *fakeQuery) { q.reply(time.Duration(dice.IntN(600))*ms, q.good()) }
	tests := map[string]struct {
		script   func(*fakeQuery)
		protocol Protocol
		answered int // of the questions, at least
	}{
		"healthy":                       {healthy(ms), Auto, questions},
		"black hole":                    {blackHole, UDPOnly, 0},
		"black hole, any protocol":      {blackHole, Auto, 0},
		"black hole over TCP":           {blackHole, TCPOnly, 0},
		"answers in 2 s":                {healthy(2 * time.Second), UDPOnly, 0},
		"answers in 2 s, any protocol":  {healthy(2 * time.Second), Auto, 0},
		"answers in 1.2 s":              {healthy(1200 * ms), UDPOnly, questions},
		"answers in 400 ms":             {healthy(400 * ms), Auto, questions},
		"answers in 0 to 600 ms":        {jittery, Auto, questions},
		"half of all packets dropped":   {dropping(dice, 50, healthy(ms)), UDPOnly, questions * 48 / 100},
		"seven tenths dropped":          {dropping(dice, 70, healthy(ms)), UDPOnly, questions * 25 / 100},
		"nine tenths dropped":           {dropping(dice, 90, healthy(ms)), UDPOnly, questions / 20},
		"servfail":                      {answering(2), Auto, questions},
		"one of two endpoints slow":     {endpoints(dice, healthy(ms), healthy(2*time.Second)), UDPOnly, questions * 8 / 10},
		"one of two endpoints dead":     {endpoints(dice, healthy(ms), blackHole), UDPOnly, questions * 85 / 100},
		"one of three endpoints lagged": {endpoints(dice, healthy(ms), healthy(ms), healthy(300*ms)), UDPOnly, questions},
	}
	for name, tt := range tests {
		for _, rate := range []struct {
			interval time.Duration
			before   int // questions while all is well
		}{{ms, 1000}, {20 * ms, 0}, {400 * ms, 0}} {
			t.Run(fmt.Sprintf("%s, one every %v, %d before", name, rate.interval, rate.before), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNet(t, healthy(ms))
					f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: tt.protocol}}})
					load(t, f, rate.before, rate.interval)
					before := len(n.queries())
					n.become(addr(1), tt.script)
					answered, slowest := load(t, f, questions, rate.interval)
					sent := len(n.queries()) - before
					st := f.Stats()
					t.Logf("%d sent for %d questions, %d answered, slowest %v, %d+%d denied, %d+%d sockets",
						sent, questions, answered, slowest, st.Denied[Hedge], st.Denied[Retry], st.Paths[UDP].Opened, st.Paths[TCP].Opened)
					limit := questions * 11 / 10
					if rate.before > 0 {
						limit += savings // which the questions before have paid for
					}
					if sent > limit {
						t.Errorf("%d sent for %d questions, %.3f times as many", sent, questions, float64(sent)/questions)
					}
					if answered < tt.answered {
						t.Errorf("%d of %d answered, want %d", answered, questions, tt.answered)
					}
				})
			})
		}
	}
}

// A dead endpoint behind a ClusterIP takes a share of all new sockets. Hedges
// find the living one, and the sockets that lead to the dead one are left.
func TestDeadEndpoint(t *testing.T) {
	for _, interval := range []time.Duration{ms / 4, ms, 10 * ms, 40 * ms} {
		t.Run(fmt.Sprintf("one question every %v", interval), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(3, 4))
				dies := time.Now().Add(5 * time.Second)
				dying := func(q *fakeQuery) {
					if time.Now().Before(dies) {
						q.reply(ms, q.good())
					}
				}
				n := newFakeNet(t, endpoints(dice, healthy(ms), dying))
				f := n.forwarder(Config{Budget: usual})
				const before, after = 5 * time.Second, 10 * time.Second
				load(t, f, int(before/interval), interval)
				sent := len(n.queries())
				questions := int(after / interval)
				answered, slowest := load(t, f, questions, interval)
				t.Logf("%d of %d answered after the death, slowest %v, %d sent", answered, questions, slowest, len(n.queries())-sent)
				if answered < questions*985/1000 {
					t.Errorf("%d of %d answered after the death", answered, questions)
				}
			})
		})
	}
}

// Once it is known, a dead first server costs nothing: no time, but for what
// was in flight, and no questions but probes.
func TestDeadFirstServer(t *testing.T) {
	for name, first := range map[string]func(*fakeQuery){
		"silent": blackHole, "refusing": refusing, "broken": answering(2),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var health []Health
				n := newFakeNet(t, healthy(ms), healthy(ms))
				f := n.forwarder(Config{Budget: usual, OnHealth: func(h Health) { health = append(health, h) }})
				if answered, slowest := load(t, f, 1000, ms); answered != 1000 || slowest != ms || n.count(addr(2), "udp") != 0 {
					t.Fatalf("%d answered, slowest %v, %d by the second server", answered, slowest, n.count(addr(2), "udp"))
				}
				n.become(addr(1), first)
				if answered, slowest := load(t, f, 2000, ms); answered != 2000 {
					t.Errorf("%d of 2000 answered at the failure of the first server, slowest %v", answered, slowest)
				}
				before := n.count(addr(1), "udp") + n.count(addr(1), "tcp")
				if answered, slowest := load(t, f, 2000, ms); answered != 2000 || slowest != ms {
					t.Errorf("%d of 2000 answered later, slowest %v", answered, slowest)
				}
				if probes := n.count(addr(1), "udp") + n.count(addr(1), "tcp") - before; probes > 4 {
					t.Errorf("%d questions to the dead server in 2 s", probes)
				}
				n.become(addr(1), healthy(ms))
				load(t, f, 1000, 100*ms) // long enough for a probe
				before = n.count(addr(2), "udp")
				if load(t, f, 100, ms); n.count(addr(2), "udp") != before {
					t.Error("the second server is asked although the first works again")
				}
				var up, down int
				for _, h := range health {
					if h.Server != addr(1) {
						t.Errorf("health of %v changed", h.Server)
					}
					if h.Up {
						up++
					} else {
						down++
					}
				}
				if up != down || down == 0 {
					t.Errorf("told %d times up, %d times down: %v", up, down, health)
				}
			})
		})
	}
}

// A protocol that a firewall drops is left for the other one, and found again.
func TestBlockedProtocol(t *testing.T) {
	t.Run("udp", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, byTransport(blackHole, healthy(ms)))
			f := n.forwarder(Config{Budget: usual})
			if answered, _ := load(t, f, 5, 3*time.Second); answered != 5 {
				t.Errorf("%d of the first 5 answered", answered)
			}
			before := n.count(addr(1), "udp")
			if answered, slowest := load(t, f, 2000, 10*ms); answered != 2000 || slowest != ms {
				t.Errorf("%d of 2000 answered, slowest %v", answered, slowest)
			}
			if probes := n.count(addr(1), "udp") - before; probes < 1 || probes > 10 {
				t.Errorf("%d probes over UDP in 20 s", probes)
			}
			if st := f.Stats(); st.Paths[UDP].Up || !st.Paths[TCP].Up {
				t.Errorf("UDP up %v, TCP up %v", st.Paths[UDP].Up, st.Paths[TCP].Up)
			}
			n.become(addr(1), healthy(ms))
			load(t, f, 1000, 100*ms)
			before = n.count(addr(1), "tcp")
			if load(t, f, 100, ms); n.count(addr(1), "tcp") != before {
				t.Error("TCP is used although UDP works again")
			}
		})
	})
	t.Run("udp, under load from the start", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, byTransport(blackHole, healthy(ms)))
			f := n.forwarder(Config{Budget: usual})
			load(t, f, 3000, ms)
			if answered, slowest := load(t, f, 2000, ms); answered != 2000 || slowest != ms {
				t.Errorf("%d of 2000 answered after 3 s, slowest %v", answered, slowest)
			}
		})
	})
	t.Run("tcp", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, byTransport(cutShort, blackHole))
			f := n.forwarder(Config{Budget: usual})
			load(t, f, 3, 3*time.Second)
			if f.Stats().Paths[TCP].Up {
				t.Error("TCP counts as up")
			}
			load(t, f, 1, 0) // a trial, if one is due
			start := time.Now()
			if _, err := f.Exchange(t.Context(), query("www.example.")); err == nil || time.Since(start) != 0 {
				t.Errorf("error %v after %v, want one at once", err, time.Since(start))
			}
		})
	})
}

// What a server does with OPT records is found out once.
func TestEDNSMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		script  func(*fakeQuery)
		learned int // questions it takes
	}{
		"formerr": {chokingOn(1), 1},
		"silent": {func(q *fakeQuery) {
			if q.IsEdns0() == nil {
				q.reply(0, q.good())
			}
		}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, tt.script)
				f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				if answered, _ := load(t, f, tt.learned, time.Minute); answered != tt.learned {
					t.Fatalf("%d of the first %d answered", answered, tt.learned)
				}
				before := len(n.queries())
				if answered, slowest := load(t, f, 10, time.Second); answered != 10 || slowest != 0 {
					t.Errorf("%d of 10 answered, slowest %v", answered, slowest)
				}
				if sent := len(n.queries()) - before; sent != 10 {
					t.Errorf("%d sent for 10 questions", sent)
				}
				if f.Stats().Paths[UDP].EDNS {
					t.Error("Stats say that OPT is sent")
				}
				n.become(addr(1), healthy(0))
				time.Sleep(ednsRetry)
				before = len(n.queries())
				load(t, f, 1, 0)
				if q := n.queries()[before]; q.IsEdns0() == nil {
					t.Error("OPT is not tried again")
				}
			})
		})
	}
	// A lost packet is no reason to do without.
	t.Run("lossy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, dropping(rand.New(rand.NewPCG(5, 6)), 20, healthy(ms)))
			f := n.forwarder(Config{Budget: usual})
			load(t, f, 2000, 20*ms)
			for _, q := range n.queries() {
				if q.IsEdns0() == nil && q.at.Sub(n.queries()[0].at) > time.Second {
					t.Fatal("OPT left out")
				}
			}
		})
	})
}

// No IP flow of ours lives long enough to become a 120 s entry of the
// connection tracker, and none is used by one question only when there are
// many.
func TestSocketRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms))
		f := n.forwarder(Config{Budget: usual})
		const questions = 20000
		load(t, f, questions, ms)
		firstUse, lastUse := make(map[netip.AddrPort]time.Time), make(map[netip.AddrPort]time.Time)
		ids := make(map[uint16]int)
		for _, q := range n.queries() {
			local := q.conn.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
			if firstUse[local].IsZero() {
				firstUse[local] = q.at
			}
			lastUse[local] = q.at
			ids[q.Id]++
		}
		for local := range firstUse {
			if age := lastUse[local].Sub(firstUse[local]); age >= 2*time.Second-ms {
				t.Errorf("%v was used for %v", local, age)
			}
		}
		if got := len(firstUse); got < 20 || got > 50 {
			t.Errorf("%d sockets in 20 s, want about two a second", got)
		}
		// 20,000 draws of 65,536: 17,260 different ones on average.
		if len(ids) < 17000 || len(ids) > 17500 {
			t.Errorf("%d different ids", len(ids))
		}
		time.Sleep(2 * time.Second)
		if st := f.Stats().Paths[UDP]; st.Sockets != 0 {
			t.Errorf("%d sockets open after two idle seconds", st.Sockets)
		}
	})
}
