package ctguard_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

const (
	vip        = "10.96.0.10:53"
	podA, podB = "10.244.0.3:5353", "10.244.0.4:5353"
)

func addr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// flow is one of a client that has just sent a packet.
func flow(client int, frontend, endpoint string) ctguard.Flow {
	c := netip.AddrPortFrom(netip.MustParseAddr("10.244.1.1"), uint16(client))
	return ctguard.Flow{
		Proto:     unix.IPPROTO_UDP,
		Orig:      ctguard.Tuple{Src: c, Dst: addr(frontend)},
		Reply:     ctguard.Tuple{Src: addr(endpoint), Dst: c},
		Remaining: 119 * time.Second,
		SeenReply: true,
		Assured:   true,
	}
}

// kubeDNS is a snapshot of the usual Service. A pod with a "-" before it
// terminates.
func kubeDNS(pods ...string) *ctguard.Snapshot {
	var es []ctguard.Endpoint
	for _, p := range pods {
		terminating := p[0] == '-'
		if terminating {
			p = p[1:]
		}
		es = append(es, ctguard.Endpoint{Addr: addr(p), Serving: true, Terminating: terminating})
	}
	return &ctguard.Snapshot{Services: []ctguard.Service{{
		Name:  "kube-system/kube-dns",
		Addrs: []netip.Addr{addr(vip).Addr()},
		Ports: []ctguard.Port{{Name: "dns", Port: 53, Endpoints: es}},
	}}}
}

// lab is a guard with a table in memory.
type lab struct {
	t     *testing.T
	table *ctguardtest.Table
	guard *ctguard.Guard

	mu     sync.Mutex
	purges []string // client port, reason, and how
	states []ctguard.State
}

// start runs a guard until the test ends. It must be called in a bubble.
func start(t *testing.T, table *ctguardtest.Table, change func(*ctguard.Config)) *lab {
	t.Helper()
	l := &lab{t: t, table: table}
	cfg := ctguard.Config{
		Table: table, Events: table, Host: table,
		OnPurge: func(p ctguard.Purge) {
			l.mu.Lock()
			defer l.mu.Unlock()
			s := fmt.Sprintf("%d %v", p.Flow.Orig.Src.Port(), p.Reason)
			if p.Event {
				s += " event"
			}
			if p.DryRun {
				s += " dry"
			}
			l.purges = append(l.purges, s)
		},
		OnState: func(s ctguard.State) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.states = append(l.states, s)
		},
	}
	if change != nil {
		change(&cfg)
	}
	g, err := ctguard.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l.guard = g
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return l
}

// add makes entries.
func (l *lab) add(fs ...ctguard.Flow) {
	l.t.Helper()
	for _, f := range fs {
		if err := l.table.Add(f); err != nil {
			l.t.Fatal(err)
		}
	}
}

// wantPurges compares and forgets what was reported.
func (l *lab) wantPurges(want ...string) {
	l.t.Helper()
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if diff := cmp.Diff(want, l.purges); diff != "" {
		l.t.Errorf("purges (-want +got):\n%s", diff)
	}
	l.purges = nil
}

// wantFlows compares the table by the client ports.
func (l *lab) wantFlows(want ...int) {
	l.t.Helper()
	synctest.Wait()
	var got []int
	for _, f := range l.table.All() {
		got = append(got, int(f.Orig.Src.Port()))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		l.t.Errorf("flows in the table (-want +got):\n%s", diff)
	}
}

func TestPurgesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{DumpTime: 20 * time.Millisecond}, nil)
		l.add(flow(1, vip, podA), flow(2, vip, podB), flow(3, "10.96.0.99:53", podA))
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(65 * time.Second)
		l.wantPurges()

		l.guard.Update(kubeDNS(podB))
		time.Sleep(50 * time.Millisecond)
		l.wantPurges("1 endpoint-gone")
		l.wantFlows(2, 3)

		s := l.guard.Stats()
		if n := s.NewsToPurge.Count(); n != 1 || s.NewsToPurge.Sum != 20*time.Millisecond {
			t.Errorf("news to purge: %d times, %v", n, s.NewsToPurge.Sum)
		}
		want := map[ctguard.Reason]uint64{ctguard.EndpointGone: 1}
		if diff := cmp.Diff(want, s.Deleted); diff != "" {
			t.Errorf("deleted (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(map[ctguard.Verdict]int{ctguard.Live: 1, ctguard.Stale: 1}, s.Flows); diff != "" {
			t.Errorf("flows (-want +got):\n%s", diff)
		}
	})
}

func TestNothingBeforeFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		time.Sleep(10 * time.Minute)
		l.wantFlows(1)
		if r := l.table.Requests(); r != (ctguardtest.Requests{}) {
			t.Errorf("asked the kernel: %+v", r)
		}
		if fs, err := l.guard.Flows(t.Context()); err != nil || fs != nil {
			t.Errorf("Flows = %v, %v", fs, err)
		}
		if s := l.guard.Stats().State; s != ctguard.Waiting {
			t.Errorf("state %v", s)
		}
	})
}

// TestSchedule counts the dumps after a change.
func TestSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podA))
		began := time.Now()
		for _, step := range []struct {
			at    time.Duration
			dumps int
		}{
			{0, 1},
			{999 * time.Millisecond, 1},
			{time.Second, 2},
			{3 * time.Second, 3},
			{10 * time.Second, 4},
			{29 * time.Second, 4},
			{30 * time.Second, 5},
			{59 * time.Second, 5},
			{60 * time.Second, 6},
			{90 * time.Second, 7},
		} {
			time.Sleep(step.at - time.Since(began))
			synctest.Wait()
			if n := l.table.Requests().Dumps; n != step.dumps {
				t.Errorf("%v after the change: %d dumps, want %d", step.at, n, step.dumps)
			}
		}
		// What says nothing new starts nothing.
		before := l.table.Requests().Dumps
		l.guard.Update(kubeDNS(podA))
		time.Sleep(20 * time.Second)
		if n := l.table.Requests().Dumps; n != before {
			t.Errorf("%d dumps after the same snapshot again", n-before)
		}
	})
}

// TestBurstOfUpdates: sweeps take at most half of the time, however many
// updates come, and the last update is not missed.
func TestBurstOfUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{DumpTime: 50 * time.Millisecond}, nil)
		l.add(flow(1, vip, podA), flow(2, vip, podB))
		for i := range 1000 {
			pods := []string{podA, podB}
			if i%2 == 1 {
				pods = append(pods, "10.244.0.9:5353")
			}
			l.guard.Update(kubeDNS(pods...))
			time.Sleep(time.Millisecond)
		}
		l.guard.Update(kubeDNS(podB))
		time.Sleep(150 * time.Millisecond)
		l.wantFlows(2)
		if n := l.table.Requests().Dumps; n > 13 {
			t.Errorf("%d sweeps of 50 ms in 1.15 s", n)
		}
	})
}

// TestLaggingRules is the race of kube-proxy: the rules make the flow to the
// dead endpoint again until they change.
func TestLaggingRules(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events bool
		within time.Duration // of the rules' change, the client is at a living endpoint
	}{
		{"events", true, 0},
		{"sweeps alone", false, 6 * time.Second}, // that at 10 s
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				table := &ctguardtest.Table{}
				l := start(t, table, func(c *ctguard.Config) {
					if !tt.events {
						c.Events = nil
					}
				})
				l.add(flow(1, vip, podA))
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(time.Minute)

				// A client that asks every 200 ms, and rules that change 4 s
				// after the news.
				rules := podA
				ask := func() string {
					for _, f := range table.All() {
						return f.Reply.Src.String()
					}
					l.add(flow(1, vip, rules))
					return rules
				}
				l.guard.Update(kubeDNS(podB))
				var healed time.Duration
				for began := time.Now(); time.Since(began) < 15*time.Second; time.Sleep(200 * time.Millisecond) {
					if time.Since(began) >= 4*time.Second {
						rules = podB
					}
					synctest.Wait()
					if ask() == podB && healed == 0 {
						healed = time.Since(began) - 4*time.Second
					}
				}
				if healed > tt.within+400*time.Millisecond || healed < 0 {
					t.Errorf("healed %v after the rules changed", healed)
				}
				if got := l.guard.Stats().Recreated; (got > 10) != tt.events {
					t.Errorf("%d flows counted as made again", got)
				}
			})
		})
	}
}

func TestSubscribesBeforeFirstDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &ctguardtest.Table{DumpTime: time.Second}
		l := start(t, table, nil)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(500 * time.Millisecond) // in the middle of the dump
		l.add(flow(1, vip, podA))
		l.wantPurges("1 endpoint-gone event")
	})
}

func TestEventsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(305 * time.Second)
		before := l.table.Requests()
		l.table.Set(flow(1, vip, podA)) // without an event
		l.table.Fail(ctguard.OpEvents, ctguard.ErrEventsLost)
		l.wantPurges("1 endpoint-gone")
		l.add(flow(2, vip, podA))
		l.wantPurges("2 endpoint-gone event")
		after := l.table.Requests()
		if after.Subscribes != before.Subscribes || after.Dumps != before.Dumps+1 {
			t.Errorf("requests before %+v, after %+v", before, after)
		}
		if n := l.guard.Stats().EventsLost; n != 1 {
			t.Errorf("EventsLost %d", n)
		}
	})
}

func TestSubscriptionBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(5 * time.Minute)
		l.table.Fail(ctguard.OpSubscribe, errors.New("no"), errors.New("no"))
		l.table.Fail(ctguard.OpEvents, errors.New("broken"))
		time.Sleep(10 * time.Second)
		l.add(flow(1, vip, podA))
		l.wantPurges("1 endpoint-gone event")
		if diff := cmp.Diff(map[ctguard.Op]uint64{ctguard.OpEvents: 1, ctguard.OpSubscribe: 2}, l.guard.Stats().Errors); diff != "" {
			t.Errorf("errors (-want +got):\n%s", diff)
		}
	})
}

func TestPortsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(time.Second)
		s := kubeDNS(podB)
		s.Services[0].Ports[0].NodePort = 30053
		s.NodeAddrs = []netip.Addr{netip.MustParseAddr("172.30.0.2")}
		l.guard.Update(s)
		time.Sleep(time.Millisecond)
		l.add(flow(1, "172.30.0.2:30053", podA), flow(2, vip, podA))
		l.wantPurges("1 endpoint-gone event", "2 endpoint-gone event")
	})
}

func TestInterruptedDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA), flow(2, vip, podB), flow(3, vip, podB))
		l.table.Fail(ctguard.OpDump, ctguard.ErrInterrupted, ctguard.ErrInterrupted)
		l.guard.Update(kubeDNS(podB))
		l.wantPurges("1 endpoint-gone")
		s := l.guard.Stats()
		if diff := cmp.Diff(map[ctguard.Verdict]int{ctguard.Live: 2, ctguard.Stale: 1}, s.Flows); diff != "" {
			t.Errorf("flows (-want +got):\n%s", diff)
		}
		if len(s.Errors) != 0 {
			t.Errorf("errors %v", s.Errors)
		}
	})
}

func TestFailures(t *testing.T) {
	for _, op := range []ctguard.Op{ctguard.OpDump, ctguard.OpDelete} {
		t.Run(string(op), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{DumpTime: time.Millisecond}, func(c *ctguard.Config) { c.Events = nil })
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(time.Hour)
				l.add(flow(1, vip, podA))
				errs := make([]error, 3)
				for i := range errs {
					errs[i] = unix.EBUSY
				}
				l.table.Fail(op, errs...)
				l.guard.Update(kubeDNS(podB))
				time.Sleep(3500 * time.Millisecond)
				l.wantPurges("1 endpoint-gone")
				s := l.guard.Stats()
				if s.Errors[op] != 3 {
					t.Errorf("errors %v", s.Errors)
				}
			})
		})
	}
}

// TestFailsForGood: what never works is tried less and less often.
func TestFailsForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		errs := make([]error, 1000)
		for i := range errs {
			errs[i] = unix.EPERM
		}
		l.table.Fail(ctguard.OpDump, errs...)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(10 * time.Minute)
		if n := l.table.Requests().Dumps; n < 30 || n > 60 {
			t.Errorf("%d attempts in ten minutes", n)
		}
		if n := l.guard.Stats().Errors[ctguard.OpDump]; int(n) != l.table.Requests().Dumps {
			t.Errorf("%d errors counted", n)
		}
	})
}

func TestHostFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		l.table.Fail(ctguard.OpHost, unix.EIO)
		l.guard.Update(kubeDNS(podB))
		l.wantPurges("1 endpoint-gone")
	})
}

// prober answers for the endpoints in alive.
type prober struct {
	mu    sync.Mutex
	alive map[netip.AddrPort]bool
	count map[netip.AddrPort]int
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

func (p *prober) probes(a string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count[addr(a)]
}

func (p *prober) Probe(ctx context.Context, at netip.AddrPort) error {
	p.mu.Lock()
	p.count[at]++
	alive := p.alive[at]
	p.mu.Unlock()
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
		time.Sleep(time.Minute)
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
		time.Sleep(time.Minute)
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
		time.Sleep(time.Minute)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(time.Minute)
		l.wantPurges()
		l.wantFlows(1)
	})
}

func TestLameDuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(podA, podB)
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Prober = p })
		busy, quiet := flow(1, vip, podA), flow(2, vip, podA)
		l.add(busy, quiet)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(time.Minute)
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
		time.Sleep(time.Hour)
		before := l.table.Requests().Dumps
		time.Sleep(10 * time.Minute)
		if n := l.table.Requests().Dumps - before; n > 20 {
			t.Errorf("%d dumps in 10 minutes", n)
		}
	})
}

func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.DryRun = true })
		l.add(flow(1, vip, podA), flow(2, vip, podB))
		l.guard.Update(kubeDNS(podB))
		time.Sleep(10 * time.Minute)
		l.wantPurges("1 endpoint-gone dry")
		l.add(flow(3, vip, podA))
		time.Sleep(10 * time.Minute)
		l.wantPurges("3 endpoint-gone event dry")
		l.wantFlows(1, 2, 3)
		s := l.guard.Stats()
		if r := l.table.Requests(); r.Deletes+r.DeleteMatching != 0 || len(s.Deleted) != 0 {
			t.Errorf("a dry run deleted: %+v, %v", r, s.Deleted)
		}
		if s.Flows[ctguard.Stale] != 2 {
			t.Errorf("flows %v", s.Flows)
		}
	})
}

func TestRateLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) {
			c.Limit = ctguard.Limit{PerSecond: 2, Burst: 4}
		})
		for i := range 10 {
			l.add(flow(i+1, vip, podA))
		}
		l.guard.Update(kubeDNS(podB))
		synctest.Wait()
		for _, left := range []int{6, 4, 2, 0} {
			synctest.Wait()
			if n := len(l.table.All()); n != left {
				t.Errorf("%d flows left, want %d", n, left)
			}
			time.Sleep(1001 * time.Millisecond)
		}
		if s := l.guard.Stats(); s.Refused != 6+4+2 || s.Deleted[ctguard.EndpointGone] != 10 {
			t.Errorf("stats %+v", s)
		}
	})
}

// TestDeletesManyAtOnce: one message instead of thousands, where that is safe
// and worth a walk over the table.
func TestDeletesManyAtOnce(t *testing.T) {
	foreignZone := flow(9999, vip, podA)
	foreignZone.Zone = 65520
	for _, tt := range []struct {
		name         string
		dumpTime     time.Duration
		notSupported bool
		other        []ctguard.Flow
		want         ctguardtest.Requests
	}{
		{"worth it", 10 * time.Millisecond, false, nil, ctguardtest.Requests{DeleteMatching: 1}},
		{"table too large", 100 * time.Millisecond, false, nil, ctguardtest.Requests{Deletes: 2000}},
		{"older kernel", 10 * time.Millisecond, true, nil, ctguardtest.Requests{DeleteMatching: 1, Deletes: 2000}},
		{"a flow in a zone of someone else's", 10 * time.Millisecond, false, []ctguard.Flow{foreignZone}, ctguardtest.Requests{Deletes: 2000}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{DumpTime: tt.dumpTime, NoDeleteMatching: tt.notSupported}, nil)
				for i := range 2000 {
					l.table.Set(flow(i+1, vip, podA))
				}
				for _, f := range tt.other {
					l.table.Set(f)
				}
				l.table.Set(flow(10000, vip, podB))
				l.guard.Update(kubeDNS(podB))
				time.Sleep(500 * time.Millisecond)
				got := l.table.Requests()
				got.Dumps, got.Entries, got.Subscribes = 0, 0, 0
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("requests (-want +got):\n%s", diff)
				}
				if n := len(l.table.All()); n != 1+len(tt.other) {
					t.Errorf("%d flows left", n)
				}
				if n := l.guard.Stats().Deleted[ctguard.EndpointGone]; n != 2000 {
					t.Errorf("%d flows counted as deleted", n)
				}
			})
		})
	}
}

func TestDeletedService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		l.guard.Update(kubeDNS(podA))
		time.Sleep(time.Minute)
		l.guard.Update(&ctguard.Snapshot{})
		l.wantPurges("1 frontend-gone")

		// Rules that lag make it again: the next sweep has it.
		time.Sleep(100 * time.Millisecond)
		l.add(flow(2, vip, podA))
		l.wantPurges()
		time.Sleep(time.Second)
		l.wantPurges("2 frontend-gone")

		// Twice the longest timeout later, it is nobody's.
		time.Sleep(4 * time.Minute)
		if n := l.guard.Stats().Gone; n != 0 {
			t.Errorf("%d tombstones after four minutes", n)
		}
		l.add(flow(3, vip, podA))
		time.Sleep(time.Minute)
		l.wantPurges()
		l.wantFlows(3)
	})
}

// TestFrontendChangesHands: another Service, not watched, has got the address
// of a deleted one. Its flows are living ones.
func TestFrontendChangesHands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podA))
		time.Sleep(time.Minute)
		l.guard.Update(&ctguard.Snapshot{})
		time.Sleep(10100 * time.Millisecond)
		l.add(flow(1, vip, podA))
		time.Sleep(4 * time.Minute)
		l.wantPurges()
		l.wantFlows(1)
	})
}

func TestChangedClusterIP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA), flow(2, "10.96.0.99:53", podA))
		l.guard.Update(kubeDNS(podA))
		time.Sleep(time.Minute)
		s := kubeDNS(podA)
		s.Services[0].Addrs = []netip.Addr{netip.MustParseAddr("10.96.0.99")}
		l.guard.Update(s)
		l.wantPurges("1 frontend-gone")
		l.wantFlows(2)

		// And back again: no tombstone remains.
		l.guard.Update(kubeDNS(podA))
		l.add(flow(3, vip, podA))
		time.Sleep(time.Minute)
		l.wantPurges("2 frontend-gone")
		l.wantFlows(3)
	})
}

// TestUntranslated is B35: a flow made while the Service had no endpoints.
func TestUntranslated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, vip))
		l.guard.Update(kubeDNS(podA))
		time.Sleep(10 * time.Minute)
		// No translated flow has been seen: something else may answer here.
		l.wantPurges()
		l.add(flow(2, vip, podA))
		l.wantPurges("1 untranslated")
		l.wantFlows(2)
		l.add(flow(3, vip, vip))
		l.wantPurges("3 untranslated event")
	})
}

func TestStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		wantStates := func(want ...ctguard.State) {
			t.Helper()
			time.Sleep(time.Minute)
			l.mu.Lock()
			defer l.mu.Unlock()
			if diff := cmp.Diff(want, l.states); diff != "" {
				t.Errorf("states (-want +got):\n%s", diff)
			}
			l.states = nil
		}
		wantStates()
		l.guard.Update(&ctguard.Snapshot{})
		wantStates(ctguard.NoService)
		l.guard.Update(kubeDNS(podA))
		wantStates(ctguard.Unseen)
		l.add(flow(1, vip, vip))
		wantStates(ctguard.Untouched)
		l.add(flow(2, vip, podA))
		wantStates(ctguard.Guarding)
		l.table.SetHost(ctguard.DefaultTimeouts, addr(vip))
		l.add(flow(3, vip, podB))
		wantStates(ctguard.IPVS)
		l.wantPurges("1 untranslated", "3 endpoint-gone event")
		l.add(flow(4, vip, podB))
		l.wantPurges()
	})
}

func TestFlows(t *testing.T) {
	// Without Run, as the command does when no daemon is there.
	table := &ctguardtest.Table{}
	g, err := ctguard.New(ctguard.Config{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []ctguard.Flow{
		flow(4, vip, vip), flow(1, vip, podA), flow(2, vip, podB), flow(3, "10.96.0.99:53", podB),
	} {
		table.Set(f)
	}
	g.Update(kubeDNS(podB))
	table.Fail(ctguard.OpDump, ctguard.ErrInterrupted)
	fs, err := g.Flows(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range fs {
		got = append(got, fmt.Sprintf("%v: %v, %v (%s %s)", f.Flow, f.Verdict, f.Reason, f.Frontend.Service, f.Frontend.Port))
	}
	want := []string{
		"10.244.1.1:1 -> 10.96.0.10:53 => 10.244.0.3:5353: stale, endpoint-gone (kube-system/kube-dns dns)",
		"10.244.1.1:2 -> 10.96.0.10:53 => 10.244.0.4:5353: live, serving (kube-system/kube-dns dns)",
		"10.244.1.1:4 -> 10.96.0.10:53 => 10.96.0.10:53: stale, untranslated (kube-system/kube-dns dns)",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("flows (-want +got):\n%s", diff)
	}
	if n := len(table.All()); n != 4 {
		t.Errorf("%d flows left", n)
	}
	table.Fail(ctguard.OpDump, unix.EPERM)
	if _, err := g.Flows(t.Context()); !errors.Is(err, unix.EPERM) {
		t.Errorf("Flows: %v", err)
	}
}

func TestNewNeedsTable(t *testing.T) {
	if _, err := ctguard.New(ctguard.Config{}); err == nil {
		t.Error("no error")
	}
}

// TestCost: what a sweep asks of the kernel does not grow with the number of
// Services' foreign flows, and nothing is deleted when all is well.
func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		for i := range 1000 {
			l.table.Set(flow(i+1, "10.96.7.7:443", podA))
			l.table.Set(flow(i+10001, vip, podB))
		}
		l.guard.Update(kubeDNS(podB))
		time.Sleep(605 * time.Second)
		want := ctguardtest.Requests{Dumps: 24, Entries: 24_000, Subscribes: 1}
		if diff := cmp.Diff(want, l.table.Requests()); diff != "" {
			t.Errorf("requests in ten minutes (-want +got):\n%s", diff)
		}
	})
}

// TestEvidence: an endpoint is ready by its EndpointSlice, and silent.
func TestEvidence(t *testing.T) {
	for _, tt := range []struct {
		name     string
		pods     []string
		heard    bool // it has answered a probe before
		dead     bool // and does not now
		evidence bool
		flow     func(second int) ctguard.Flow // the flow to it
		want     []string
		probes   bool // beyond the first
	}{
		{
			name: "dead, old flow", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: asks(100, 0), want: []string{"1 unanswered"}, probes: true,
		},
		{
			name: "dead, flow that never had a reply", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: neverReplied, want: []string{"1 unanswered"}, probes: true,
		},
		{
			name: "no evidence wanted", pods: []string{podA, podB}, heard: true, dead: true, evidence: false,
			flow: asks(100, 0),
		},
		{
			name: "the last one", pods: []string{podA}, heard: true, dead: true, evidence: true,
			flow: asks(100, 0), probes: true,
		},
		{
			name: "answers probes", pods: []string{podA, podB}, heard: true, dead: false, evidence: true,
			flow: asks(100, 0), probes: true,
		},
		{
			name: "never heard", pods: []string{podA, podB}, heard: false, dead: true, evidence: true,
			flow: asks(100, 0), probes: true, // in search of a first answer
		},
		{
			name: "old losses", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: func(int) ctguard.Flow { return counted(1000, 900) },
		},
		{
			name: "slow, but replies come", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: asks(100, 1),
		},
		{
			name: "all is well", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: func(s int) ctguard.Flow { return counted(uint64(100+s), uint64(100+s)) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProber(podB)
				p.set(podA, tt.heard)
				l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) {
					c.Prober, c.Evidence, c.Events = p, tt.evidence, nil
				})
				l.guard.Update(kubeDNS(tt.pods...))
				time.Sleep(time.Minute)
				before := p.probes(podA)
				p.set(podA, !tt.dead)
				purged := time.Duration(0)
				for s := range 20 {
					if purged == 0 {
						l.table.Set(tt.flow(s))
					}
					time.Sleep(time.Second)
					if l.guard.Stats().Deleted[ctguard.Unanswered] > 0 && purged == 0 {
						purged = time.Duration(s+1) * time.Second
					}
				}
				l.wantPurges(tt.want...)
				if len(tt.want) > 0 && purged > 12*time.Second {
					t.Errorf("purged after %v", purged)
				}
				if got := p.probes(podA) > before; got != tt.probes {
					t.Errorf("%d probes", p.probes(podA)-before)
				}
				if silent := len(l.guard.Stats().Silent) > 0; silent != (tt.evidence && tt.heard && tt.dead && tt.probes) {
					t.Errorf("silent: %v", silent)
				}
				// It comes back.
				p.set(podA, true)
				time.Sleep(2 * time.Second)
				if s := l.guard.Stats().Silent; len(s) != 0 {
					t.Errorf("still believed dead: %v", s)
				}
			})
		})
	}
}

func counted(packets, replies uint64) ctguard.Flow {
	f := flow(1, vip, podA)
	f.Packets, f.Replies = packets, replies
	return f
}

// asks is a flow that sends a query each second, and has so many replies to
// each.
func asks(before, replies int) func(int) ctguard.Flow {
	return func(s int) ctguard.Flow { return counted(uint64(before+10+s), uint64(before+s*replies)) }
}

func neverReplied(int) ctguard.Flow {
	f := flow(1, vip, podA)
	f.SeenReply, f.Assured = false, false
	f.Remaining = 27 * time.Second
	return f
}
