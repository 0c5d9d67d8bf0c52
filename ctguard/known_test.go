package ctguard_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

// TestKnownDuringSweep: known flows do not wait for a sweep that is under way.
func TestKnownDuringSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{DumpTime: time.Second}, nil)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(65 * time.Second)
		l.add(flow(1, vip, podA), flow(2, vip, podB))
		l.guard.Update(kubeDNS(podA, podB, "10.244.0.9:5353"))
		time.Sleep(500 * time.Millisecond) // in the middle of the dump
		dumps := l.table.Requests().Dumps
		l.guard.Update(kubeDNS(podB))
		l.wantPurges("1 endpoint-gone")
		if n := l.table.Requests().Dumps; n != dumps {
			t.Errorf("%d dumps for a flow that is known", n-dumps)
		}
		time.Sleep(65 * time.Second)
		l.wantPurges()
		l.wantFlows(2)
	})
}

// TestKnownReasons: only what an endpoint's end condemns is deleted without
// looking at the flow again. For the rest, the sweep does.
func TestKnownReasons(t *testing.T) {
	gone := kubeDNS(podA, podB)
	gone.Services = nil
	port := kubeDNS("10.244.0.3:53", podB)
	notServing := kubeDNS(podA, podB)
	notServing.Services[0].Ports[0].Endpoints[0].Serving = false
	for _, tt := range []struct {
		name  string
		news  *ctguard.Snapshot
		early bool
		want  string
	}{
		{"endpoint gone", kubeDNS(podB), true, "1 endpoint-gone"},
		{"endpoint not serving", notServing, true, "1 not-serving"},
		{"no endpoint left", kubeDNS(), true, "1 no-endpoints"},
		{"other port", port, false, "1 port-changed"},
		{"service gone", gone, false, "1 frontend-gone"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{DumpTime: 20 * time.Millisecond}, nil)
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(65 * time.Second)
				l.add(flow(1, vip, podA))
				synctest.Wait()
				l.guard.Update(tt.news)
				if !tt.early {
					l.wantPurges()
					time.Sleep(50 * time.Millisecond)
				}
				l.wantPurges(tt.want)
			})
		})
	}
}

// TestKnownMoved: between the last look and the news, the client has got a flow
// to a living endpoint. It is another reply tuple, and out of reach.
func TestKnownMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(65 * time.Second)
		l.add(flow(1, vip, podA))
		synctest.Wait()
		if _, err := l.table.Delete(t.Context(), l.table.All()); err != nil {
			t.Fatal(err)
		}
		l.table.Set(flow(1, vip, podB))
		l.guard.Update(kubeDNS(podB))
		l.wantPurges()
		l.wantFlows(1)
	})
}

// TestKnownIsBounded: neither many flows that last nor many new ones make the
// guard remember more than so many; all of them are deleted, the others by the
// sweep.
func TestKnownIsBounded(t *testing.T) {
	const most, many = 4096, 10_000
	for _, tt := range []struct {
		name    string
		events  bool
		leftOut int
	}{
		{"that last", false, many - most},
		{"that events told of", true, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{DumpTime: time.Second}, nil)
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(67 * time.Second)
				if !tt.events {
					for i := range many {
						l.table.Set(flow(i+1, vip, podA))
					}
					time.Sleep(32 * time.Second)
				} else {
					for i := range many {
						l.table.Announce(flow(i+1, vip, podA))
					}
				}
				synctest.Wait()
				s := l.guard.Stats()
				if s.Known != most || s.KnownLeftOut != tt.leftOut {
					t.Errorf("%d known, %d left out", s.Known, s.KnownLeftOut)
				}
				l.guard.Update(kubeDNS(podB))
				synctest.Wait()
				if n := l.guard.Stats().DeletedEarly; n != most {
					t.Errorf("%d deleted early", n)
				}
				if tt.events { // the newest
					for _, f := range l.table.All() {
						if f.Orig.Src.Port() > many-most {
							t.Fatalf("flow %v is left", f)
						}
					}
				}
				time.Sleep(10 * time.Second)
				l.wantFlows()
			})
		})
	}
	if size := 2 * most * unsafe.Sizeof(ctguard.KnownFlow{}); size > 1_500_000 {
		t.Errorf("%d bytes", size)
	}
}

// TestKnownAges: what can have expired is not deleted on memory, be it that a
// sweep or an event told of it: its tuple may be another flow's, and news cost no
// messages about what is long gone.
func TestKnownAges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(65 * time.Second)
		before := l.guard.Stats().Sweeps
		for i := range 100 {
			f := flow(i+1, vip, podA)
			f.Remaining = 10 * time.Second
			if i%2 == 0 {
				l.table.Announce(f)
			} else {
				l.table.Set(f)
			}
		}
		for l.guard.Stats().Sweeps == before {
			time.Sleep(time.Second)
		}
		if known := l.guard.Stats().Known; known < 100 {
			t.Fatalf("%d known", known)
		}
		if _, err := l.table.Delete(t.Context(), l.table.All()); err != nil {
			t.Fatal(err)
		}
		deletes := l.table.Requests().Deletes
		time.Sleep(11 * time.Second)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(65 * time.Second)
		if n := l.table.Requests().Deletes - deletes; n != 0 {
			t.Errorf("%d flows that are gone were deleted", n)
		}
	})
}

// TestKnownDryRun: a dry run reports a known flow once.
func TestKnownDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.DryRun = true })
		l.guard.Update(kubeDNS(podA, podB))
		l.add(flow(1, vip, podA))
		time.Sleep(65 * time.Second)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(305 * time.Second)
		l.wantPurges("1 endpoint-gone dry")
		l.wantFlows(1)
	})
}

// TestKnownRefused: what the rate limit or an error leaves of the known flows is
// the sweeps' to delete.
func TestKnownRefused(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit ctguard.Limit
		err   error
	}{
		{"limit", ctguard.Limit{PerSecond: 2, Burst: 4}, nil},
		{"error", ctguard.DefaultLimit(), fmt.Errorf("busy")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.Limit = tt.limit })
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(65 * time.Second)
				for i := range 10 {
					l.add(flow(i+1, vip, podA))
				}
				if tt.err != nil {
					l.table.Fail(ctguard.OpDelete, tt.err)
				}
				l.guard.Update(kubeDNS(podB))
				time.Sleep(10 * time.Second)
				l.wantFlows()
				want := map[ctguard.Reason]uint64{ctguard.EndpointGone: 10}
				if diff := cmp.Diff(want, l.guard.Stats().Deleted); diff != "" {
					t.Errorf("deleted (-want +got):\n%s", diff)
				}
			})
		})
	}
}
