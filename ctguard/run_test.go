package ctguard_test

import (
	"errors"
	"net/netip"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

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
				time.Sleep(67 * time.Second)

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

// TestEndpointIsBackDuringSweep: an endpoint leaves, and is there again before
// the table has been read. What leads to it by then is alive, be it one flow or
// so many that one message would delete them all.
func TestEndpointIsBackDuringSweep(t *testing.T) {
	for _, flows := range []int{1, 1000} {
		t.Run(strconv.Itoa(flows), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{DumpTime: 5 * time.Millisecond}, nil)
				l.guard.Update(kubeDNS(podA, podB))
				time.Sleep(67 * time.Second)
				l.guard.Update(kubeDNS(podB))
				time.Sleep(time.Millisecond)
				l.guard.Update(kubeDNS(podA, podB))
				synctest.Wait()
				for i := range flows {
					l.table.Announce(flow(i+1, vip, podA))
				}
				time.Sleep(67 * time.Second)
				l.wantPurges()
				if n := len(l.table.All()); n != flows {
					t.Errorf("%d of %d living flows are left", n, flows)
				}
			})
		})
	}
}

// TestEndpointIsBackAndTerminates: of what leads to it, only what is idle goes.
func TestEndpointIsBackAndTerminates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{DumpTime: 5 * time.Millisecond}, nil)
		l.guard.Update(kubeDNS(podA, podB))
		time.Sleep(67 * time.Second)
		for i := range 1000 {
			f := flow(i+1, vip, podA)
			if i > 0 {
				f.Remaining = 50 * time.Second
			}
			l.table.Set(f)
		}
		l.guard.Update(kubeDNS(podB))
		time.Sleep(time.Millisecond)
		l.guard.Update(kubeDNS("-"+podA, podB))
		time.Sleep(67 * time.Second)
		l.wantFlows(1)
		if diff := cmp.Diff(map[ctguard.Reason]uint64{ctguard.TerminatingIdle: 999}, l.guard.Stats().Deleted); diff != "" {
			t.Errorf("deleted (-want +got):\n%s", diff)
		}
	})
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
		// One that was lost while the guard was reading the others.
		l.table.Set(flow(3, vip, podA))
		time.Sleep(1001 * time.Millisecond)
		l.wantPurges("3 endpoint-gone")
	})
}

func TestSubscriptionBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.guard.Update(kubeDNS(podB))
		time.Sleep(307 * time.Second)
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
				time.Sleep(3607 * time.Second)
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

func TestHostFails(t *testing.T) {
	t.Run("later", func(t *testing.T) { // what it has told stays in force
		synctest.Test(t, func(t *testing.T) {
			l := start(t, &ctguardtest.Table{}, nil)
			l.table.SetHost(ctguard.Timeouts{Unreplied: 10 * time.Second, Stream: 20 * time.Second}, addr("10.96.0.11:53"))
			busy, ipvs := flow(1, vip, podA), flow(2, "10.96.0.11:53", "10.244.0.9:5353")
			busy.Remaining = 19 * time.Second
			l.add(busy, ipvs)
			s := kubeDNS("-"+podA, podB)
			s.Services[0].Addrs = append(s.Services[0].Addrs, addr("10.96.0.11:53").Addr())
			l.guard.Update(s)
			time.Sleep(67 * time.Second)
			l.wantPurges()
			var errs []error
			for range 1000 {
				errs = append(errs, unix.EMFILE)
			}
			l.table.Fail(ctguard.OpHost, errs...)
			time.Sleep(67 * time.Second)
			l.wantPurges()
			if n := l.guard.Stats().Errors[ctguard.OpHost]; n == 0 {
				t.Error("no error counted")
			}
		})
	})
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		l.table.Fail(ctguard.OpHost, unix.EIO)
		l.guard.Update(kubeDNS(podB))
		l.wantPurges("1 endpoint-gone")
	})
}
