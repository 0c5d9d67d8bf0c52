package ctguard_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

const podC = "10.244.0.5:5353"

// silenceFound is when a silent stranger is condemned: two probes, and another
// endpoint's answer.
const silenceFound = 301 * time.Millisecond

func withProber(p *prober) func(*ctguard.Config) {
	return func(c *ctguard.Config) { c.Prober = p }
}

// TestNewsLag: kube-proxy uses an endpoint before any snapshot has it, and no
// watch reports an error. None of its flows is touched, whatever the news say
// later, until it leaves.
func TestNewsLag(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before *ctguard.Snapshot
		probed bool // the others can be
	}{
		{"another endpoint serves", kubeDNS(podB), true},
		{"another serves, and no probe comes through to it", kubeDNS(podB), false},
		{"none serves", kubeDNS(), true},
		{"none serves, and it is listed", notServing(podC), true},
		{"it is listed, and another serves", notServing(podC, podB), true},
		{"under another port", kubeDNS("10.244.0.5:53", podB), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProber(podC)
				p.set(podB, tt.probed)
				l := start(t, &ctguardtest.Table{}, withProber(p))
				l.guard.Update(tt.before)
				time.Sleep(37 * time.Second)
				l.table.Set(flow(1, vip, podC)) // found by a sweep
				for i := range 40 {
					l.add(flow(i+2, vip, podC))
					time.Sleep(time.Second)
				}
				l.wantPurges()
				if n := p.probes(podC); n < 7 || n > 14 {
					t.Errorf("%d probes in 40 s", n)
				}
				if s := l.guard.Stats(); s.Flows[ctguard.Held] == 0 || s.Recreated != 0 {
					t.Errorf("stats %+v", s)
				}

				// The news come, and it is an endpoint like others.
				l.guard.Update(kubeDNS(podB, podC))
				time.Sleep(67 * time.Second)
				l.wantPurges()
				if s := l.guard.Stats(); s.Flows[ctguard.Live] != 41 || s.Flows[ctguard.Held] != 0 {
					t.Errorf("flows %v", s.Flows)
				}
				if n := p.probes(podC); n > 17 {
					t.Errorf("%d probes: it is probed on", n)
				}
				l.guard.Update(kubeDNS(podB))
				l.wantFlows()
				l.add(flow(99, vip, podC))
				l.wantFlows() // at once
			})
		})
	}
}

// notServing is a snapshot in which the first endpoint does not serve.
func notServing(pods ...string) *ctguard.Snapshot {
	s := kubeDNS(pods...)
	s.Services[0].Ports[0].Endpoints[0].Serving = false
	return s
}

// TestRestartWithDeadEndpoint: an endpoint died and left before the guard began.
func TestRestartWithDeadEndpoint(t *testing.T) {
	for _, tt := range []struct {
		name   string
		news   *ctguard.Snapshot
		alive  []string
		within time.Duration
		want   string
	}{
		{"gone", kubeDNS(podB), []string{podB}, silenceFound, "endpoint-gone"},
		{"no other left", kubeDNS(), nil, silenceFound, "no-endpoints"},
		{"not serving", notServing(podA, podB), []string{podB}, silenceFound, "not-serving"},
		{"other port", kubeDNS("10.244.0.3:53", podB), []string{podB}, silenceFound, "port-changed"},
		{"the other does not answer for a while", kubeDNS(podB), nil, 62 * time.Second, "endpoint-gone"},
		{"alive, but said not to serve for a while", notServing(podA, podB), []string{podA, podB}, 68 * time.Second, "not-serving"},
	} {
		for _, known := range []string{"found by the sweep", "event"} {
			t.Run(tt.name+", "+known, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := start(t, &ctguardtest.Table{}, withProber(newProber(tt.alive...)))
					if known != "event" {
						l.table.Set(flow(1, vip, podA))
					}
					l.guard.Update(tt.news)
					synctest.Wait()
					if known == "event" {
						l.add(flow(1, vip, podA))
					}
					time.Sleep(silenceFound - 2*time.Millisecond)
					l.wantPurges()
					time.Sleep(tt.within - silenceFound + 2*time.Millisecond)
					l.wantPurges("1 " + tt.want)

					// The old rules make it again.
					l.add(flow(2, vip, podA))
					l.wantPurges("2 " + tt.want + " event")
				})
			})
		}
	}
}

// TestStranger is its life: it answers, falls silent, answers again, and is
// forgotten when no flow leads to it any more.
func TestStranger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podB, podC)
		l := start(t, &ctguardtest.Table{}, withProber(p))
		l.guard.Update(kubeDNS(podB))
		time.Sleep(37 * time.Second)
		l.add(flow(1, vip, podC))
		time.Sleep(20 * time.Second)
		l.wantPurges()
		p.set(podC, false)
		time.Sleep(7 * time.Second)
		l.wantPurges("1 endpoint-gone")
		p.set(podC, true)
		time.Sleep(2 * time.Second)
		l.add(flow(2, vip, podC))
		l.wantPurges()
		time.Sleep(600 * time.Second)
		l.wantPurges()
		l.wantFlows(2)
		if _, err := l.table.Delete(t.Context(), l.table.All()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(127 * time.Second)
		before := p.probes(podC)
		time.Sleep(607 * time.Second)
		if n := p.probes(podC); n != before {
			t.Errorf("%d probes without a flow", n-before)
		}

		// Nor is its silence remembered.
		p.set(podC, false)
		l.add(flow(3, vip, podC))
		time.Sleep(silenceFound)
		l.wantPurges("3 endpoint-gone")
		time.Sleep(127 * time.Second)
		p.set(podC, true)
		l.add(flow(4, vip, podC))
		time.Sleep(67 * time.Second)
		l.wantPurges()
	})
}

// TestStrangerInDoubt: while the source is out of touch, only silence beside
// another's answer counts.
func TestStrangerInDoubt(t *testing.T) {
	for _, other := range []bool{true, false} {
		t.Run(fmt.Sprintf("another answers: %v", other), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProber()
				p.set(podB, other)
				l := start(t, &ctguardtest.Table{}, withProber(p))
				l.guard.Update(kubeDNS(podB))
				l.guard.Doubt(true)
				time.Sleep(37 * time.Second)
				l.add(flow(1, vip, podC))
				time.Sleep(607 * time.Second)
				if other {
					l.wantPurges("1 endpoint-gone")
					return
				}
				l.wantPurges()
				l.guard.Doubt(false)
				time.Sleep(2 * time.Second)
				l.wantPurges("1 endpoint-gone")
			})
		})
	}
}

// TestListedInDoubt: a snapshot that may be old says that an endpoint does not
// serve, for however long: its answers say more.
func TestListedInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, withProber(newProber(podB, podC)))
		l.guard.Update(notServing(podC, podB))
		l.guard.Doubt(true)
		time.Sleep(37 * time.Second)
		l.add(flow(1, vip, podC))
		time.Sleep(607 * time.Second)
		l.wantPurges()
		l.guard.Doubt(false)
		time.Sleep(7 * time.Second)
		l.wantPurges("1 not-serving")
	})
}

// TestStrangerNotProbed: that no probe can be sent is held against nobody, unless
// the news had time enough to come.
func TestStrangerNotProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podB)
		p.stuck(true)
		l := start(t, &ctguardtest.Table{}, withProber(p))
		l.guard.Update(kubeDNS(podB))
		l.add(flow(1, vip, podC))
		time.Sleep(50 * time.Second)
		l.wantPurges()
		time.Sleep(12 * time.Second)
		l.wantPurges("1 endpoint-gone")
	})
}

// TestManyStrangers: no more than so many are probed at a time, and yet all flows
// to dead ones go.
func TestManyStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many, most = 600, 256
		p := newProber(podB)
		l := start(t, &ctguardtest.Table{}, withProber(p))
		for i := range many {
			l.table.Set(flow(i+1, vip, fmt.Sprintf("10.244.%d.%d:53", 1+i/250, 1+i%250)))
		}
		l.guard.Update(kubeDNS(podB))
		time.Sleep(500 * time.Millisecond)
		if n := many - len(l.table.All()); n != most {
			t.Errorf("%d flows deleted", n)
		}
		time.Sleep(247 * time.Second)
		l.wantFlows()
	})
}

// TestRecall: a guard that replaces another knows what has left, although it lives.
func TestRecall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before, err := ctguard.New(ctguard.Config{Table: &ctguardtest.Table{}})
		if err != nil {
			t.Fatal(err)
		}
		before.Update(kubeDNS(podA, podB, podC))
		before.Update(kubeDNS(podB, podC))
		l := start(t, &ctguardtest.Table{}, withProber(newProber(podA, podB, podC)))
		synctest.Wait()
		l.add(flow(1, vip, podA), flow(2, vip, podB), flow(3, vip, podC), flow(4, vip, "10.244.0.6:53"))
		l.guard.Recall(before)
		l.guard.Update(kubeDNS(podB))
		l.wantFlows(2, 4)
	})
}
