package ctguard_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

// prober answers for the endpoints in alive.
type prober struct {
	mu    sync.Mutex
	alive map[netip.AddrPort]bool
	count map[netip.AddrPort]int
	local bool // nothing can be sent
}

func newProber(alive ...string) *prober {
	p := &prober{alive: make(map[netip.AddrPort]bool), count: make(map[netip.AddrPort]int)}
	for _, a := range alive {
		p.alive[addr(a)] = true
	}
	return p
}

func (p *prober) set(a string, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alive[addr(a)] = alive
}

func (p *prober) stuck(is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.local = is
}

func (p *prober) probes(a string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count[addr(a)]
}

func (p *prober) Probe(ctx context.Context, at netip.AddrPort) error {
	p.mu.Lock()
	p.count[at]++
	alive, local := p.alive[at], p.local
	p.mu.Unlock()
	if local {
		return fmt.Errorf("no file descriptor: %w", ctguard.ErrNotSent)
	}
	if alive {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func TestTerminatingEndpointThatIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podA, podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		l.add(flow(1, vip, podA), flow(2, vip, podB))
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		if n := p.probes(podA); n != 1 {
			t.Errorf("%d probes to an endpoint that has answered the first", n)
		}

		p.set(podA, false)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(299 * time.Millisecond)
		l.wantPurges()
		time.Sleep(2 * time.Millisecond)
		l.wantPurges("1 terminating-silent")
		l.wantFlows(2)
		if n := p.probes(podA); n != 3 {
			t.Errorf("%d probes, want the first and two more", n)
		}
		s := l.guard.Stats()
		if s.NewsToPurge.Count() != 1 || s.NewsToPurge.Sum != 0 || !slices.Equal(s.Silent, []netip.AddrPort{addr(podA)}) {
			t.Errorf("stats %+v", s)
		}

		// Made again by rules that lag.
		l.add(flow(3, vip, podA))
		l.wantPurges("3 terminating-silent event")

		// It was only slow: it answers again, and is left alone.
		p.set(podA, true)
		time.Sleep(1500 * time.Millisecond)
		l.add(flow(4, vip, podA))
		l.wantPurges()

		// It leaves the slices, and is forgotten.
		l.guard.Update(kubeDNS(podB))
		l.wantPurges("4 endpoint-gone")
		before := p.probes(podA)
		time.Sleep(67 * time.Second)
		if n := p.probes(podA); n != before {
			t.Errorf("%d probes to an endpoint that has left", n-before)
		}
	})
}

// TestTerminatingEndpointNeverHeard: a network policy may block our probes.
func TestTerminatingEndpointNeverHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		l.add(flow(1, vip, podA))
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(67 * time.Second)
		l.wantPurges()
		l.wantFlows(1)
	})
}

// TestProbesBlocked: a firewall begins to drop our probes to every endpoint. That
// one of them terminates then does not make it dead.
func TestProbesBlocked(t *testing.T) {
	for _, evidence := range []bool{false, true} {
		t.Run(fmt.Sprintf("evidence %v", evidence), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const podC = "[fd00:10:244::4]:5353" // of the other family: not blocked
				p := newProber(podA, podB, podC)
				l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober, c.Evidence = p, evidence })
				dual := func(pods ...string) *ctguard.Snapshot {
					s := kubeDNS(append(pods, podC)...)
					s.Services[0].Addrs = append(s.Services[0].Addrs, netip.MustParseAddr("fd00:10:96::a"))
					return s
				}
				l.add(flow(1, vip, podA), flow(2, vip, podB))
				l.guard.Update(dual(podA, podB))
				time.Sleep(67 * time.Second)
				p.set(podA, false)
				p.set(podB, false)
				l.guard.Update(dual("-"+podA, podB))
				time.Sleep(7 * time.Second)
				l.add(flow(3, vip, podA))
				l.wantPurges()
				if s := l.guard.Stats(); len(s.Silent) != 0 {
					t.Errorf("silent: %v", s.Silent)
				}

				// The firewall lets some pass: now it is seen who is silent.
				p.set(podB, true)
				time.Sleep(2 * time.Second)
				l.wantFlows(2)
				if n := l.guard.Stats().Deleted[ctguard.TerminatingSilent]; n != 2 {
					t.Errorf("%d flows deleted", n)
				}
			})
		})
	}
}

// TestProbesOthersUnheard: the only other endpoint that could be probed has left,
// and none of the rest can be. Nobody can tell then, and the silence counts.
func TestProbesOthersUnheard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const podC = "10.244.9.9:5353"
		p := newProber(podA, podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		l.add(flow(1, vip, podA), flow(3, vip, podC))
		l.guard.Update(kubeDNS(podA, podB, podC))
		time.Sleep(67 * time.Second)
		p.set(podA, false)
		p.set(podB, false)
		l.guard.Update(kubeDNS("-"+podA, podC))
		time.Sleep(time.Second)
		l.wantPurges("1 terminating-silent")
		l.wantFlows(3)
	})
}

// TestProbesNotSent: that no probe can be sent is not the endpoint's silence, nor
// does it make a silent one alive.
func TestProbesNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podA, podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		l.add(flow(1, vip, podA))
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		p.stuck(true)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(7 * time.Second)
		l.wantPurges()
		if n := p.probes(podA); n < 8 {
			t.Errorf("%d probes were tried", n)
		}

		p.stuck(false)
		p.set(podA, false)
		time.Sleep(1500 * time.Millisecond)
		l.wantPurges("1 terminating-silent")
		p.stuck(true)
		time.Sleep(1500 * time.Millisecond)
		l.add(flow(2, vip, podA))
		l.wantPurges("2 terminating-silent event")
	})
}

func TestLameDuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podA, podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		busy, quiet := flow(1, vip, podA), flow(2, vip, podA)
		l.add(busy, quiet)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(5 * time.Second)
		l.wantPurges()

		quiet.Remaining = 116 * time.Second
		l.table.Set(quiet)
		time.Sleep(2 * time.Second)
		l.wantPurges("2 terminating-idle")
		l.wantFlows(1)
		if n := p.probes(podA); n < 7 {
			t.Errorf("%d probes in 7 s: a lame duck has to be probed on", n)
		}

		// It dies before it leaves the slices.
		p.set(podA, false)
		time.Sleep(1400 * time.Millisecond)
		l.wantPurges("1 terminating-silent")

		// Nothing waits to become idle any more: no more sweeps than usual.
		time.Sleep(3607 * time.Second)
		before := l.table.Requests().Dumps
		time.Sleep(607 * time.Second)
		if n := l.table.Requests().Dumps - before; n > 20 {
			t.Errorf("%d dumps in 10 minutes", n)
		}
	})
}
