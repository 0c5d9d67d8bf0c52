package ctguard_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
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

// The tests sleep for seven seconds more than a multiple of 30, so that what
// they do next does not meet a regular sweep at the same instant.

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

// TestPurgesAtOnce: a flow that the guard knows goes with the news, one that it
// does not with the sweep after it.
func TestPurgesAtOnce(t *testing.T) {
	const walk = 20 * time.Millisecond
	for _, tt := range []struct {
		name    string
		prepare func(*lab) // after the first news, by which all is well
		within  time.Duration
	}{
		{"seen by a sweep", func(l *lab) {
			l.table.Set(flow(1, vip, podA))
			time.Sleep(65 * time.Second)
		}, 0},
		{"told of by an event", func(l *lab) {
			time.Sleep(65 * time.Second)
			l.add(flow(1, vip, podA))
		}, 0},
		{"not known", func(l *lab) {
			time.Sleep(65 * time.Second)
			l.table.Set(flow(1, vip, podA))
		}, walk},
		{"too short to be remembered by a sweep", func(l *lab) {
			f := flow(1, vip, podA)
			f.Assured = false
			l.table.Set(f)
			time.Sleep(65 * time.Second)
		}, walk},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// It goes on to answer, and yet it is not asked.
				l := start(t, &ctguardtest.Table{DumpTime: walk}, withProber(newProber(podA, podB)))
				l.table.Set(flow(2, vip, podB))
				l.table.Set(flow(3, "10.96.0.99:53", podA))
				l.guard.Update(kubeDNS(podA, podB))
				tt.prepare(l)
				l.wantPurges()

				l.guard.Update(kubeDNS(podB))
				if tt.within > 0 {
					l.wantPurges()
					time.Sleep(tt.within)
				}
				l.wantPurges("1 endpoint-gone")
				l.wantFlows(2, 3)
				time.Sleep(50 * time.Millisecond)

				s := l.guard.Stats()
				if n := s.NewsToPurge.Count(); n != 1 || s.NewsToPurge.Sum != tt.within {
					t.Errorf("news to purge: %d times, %v", n, s.NewsToPurge.Sum)
				}
				want := map[ctguard.Reason]uint64{ctguard.EndpointGone: 1}
				if diff := cmp.Diff(want, s.Deleted); diff != "" {
					t.Errorf("deleted (-want +got):\n%s", diff)
				}
				flows := map[ctguard.Verdict]int{ctguard.Live: 1}
				if tt.within > 0 {
					flows[ctguard.Stale] = 1
				}
				if diff := cmp.Diff(flows, s.Flows); diff != "" {
					t.Errorf("flows (-want +got):\n%s", diff)
				}
				if early := s.DeletedEarly == 1; early != (tt.within == 0) {
					t.Errorf("%d deleted early", s.DeletedEarly)
				}
			})
		})
	}
}

func TestNothingBeforeFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		time.Sleep(607 * time.Second)
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

func TestFlows(t *testing.T) {
	// Without Run, as the command does when no daemon is there.
	table, prober := &ctguardtest.Table{}, newProber()
	g, err := ctguard.New(ctguard.Config{Table: table, Prober: prober})
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
	if n := prober.probes(podA); n != 0 {
		t.Errorf("%d probes without Run", n)
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

// TestDoubt: while the snapshot may be old, nothing is held against an endpoint
// that none has had; what has left before stays condemned.
func TestDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const podC = "10.244.0.5:5353"
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		l.guard.Update(kubeDNS(podB))
		l.guard.Doubt(true)
		time.Sleep(67 * time.Second)
		l.add(flow(1, vip, podA), flow(2, vip, podB), flow(3, vip, podC))
		l.wantPurges("1 endpoint-gone event")
		time.Sleep(67 * time.Second)
		l.wantPurges()
		l.wantFlows(2, 3)

		// The news come, and there is no such endpoint.
		l.guard.Doubt(false)
		l.wantPurges("3 endpoint-gone")
		l.wantFlows(2)
	})
}
