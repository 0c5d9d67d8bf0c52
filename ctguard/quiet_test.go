package ctguard_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

const gone6 = "[fd00:10:244::9]:5353"

// dualStack is kubeDNS with an address of each family.
func dualStack(pods ...string) *ctguard.Snapshot {
	s := kubeDNS(pods...)
	s.Services[0].Addrs = append(s.Services[0].Addrs, addr(vip6).Addr())
	return s
}

// remove has a flow expire.
func remove(l *lab, f ctguard.Flow) {
	l.t.Helper()
	if _, err := l.table.Delete(l.t.Context(), []ctguard.Flow{f}); err != nil {
		l.t.Fatal(err)
	}
}

// TestQuietFamily counts the dumps of a dual-stack Service, which pods use by one
// of its addresses only.
func TestQuietFamily(t *testing.T) {
	six := flow6(6, vip6, pod6)
	for _, tt := range []struct {
		name string
		act  func(*lab) // 45 s after the change, and again at 75 s
		want []int      // dumps for each of the sweeps after that: at 60, 90 and 120 s
	}{
		{"nothing", func(*lab) {}, []int{1, 1, 1}},
		{"a flow", func(l *lab) { remove(l, six); l.add(six) }, []int{2, 2, 2}},
		{"a flow that goes again", func(l *lab) {
			l.add(six)
			remove(l, six)
		}, []int{2, 2, 1}},
		{"a flow of the other family", func(l *lab) { l.table.Announce(flow(3, vip, podB)) }, []int{1, 1, 1}},
		{"a flow that no event tells of", func(l *lab) { l.table.Set(six) }, []int{1, 1, 1}},
		{"the last flow of the other family goes", func(l *lab) {
			remove(l, flow(1, vip, podA))
			// What is not read is made up for by the other, or both are read.
		}, []int{1, 2, 2}},
		{"other knowledge", func(l *lab) {
			l.table.SetHost(ctguard.Timeouts{Unreplied: 20 * time.Second, Stream: 100 * time.Second})
		}, []int{2, 1, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{}, nil)
				l.add(flow(1, vip, podA))
				dumps := 0
				counted := func() int {
					synctest.Wait()
					n := l.table.Requests().Dumps - dumps
					dumps += n
					return n
				}
				l.guard.Update(dualStack(podA, podB, pod6))
				began := time.Now()
				var got []int
				for _, at := range []time.Duration{0, 1, 3, 10, 30} {
					time.Sleep(at*time.Second - time.Since(began))
					got = append(got, counted())
				}
				// Translated flows, which the first sweep finds, are news for the second.
				if diff := cmp.Diff([]int{2, 2, 1, 1, 1}, got); diff != "" {
					t.Errorf("dumps after the change (-want +got):\n%s", diff)
				}
				got = nil
				for _, at := range []time.Duration{60, 90, 120} {
					if at < 120 {
						time.Sleep((at-15)*time.Second - time.Since(began))
						tt.act(l)
					}
					time.Sleep(at*time.Second - time.Since(began))
					got = append(got, counted())
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("dumps later (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestQuietFamilyIsReadAgain: events that are lost, a subscription that breaks, news
// and time have a family read again.
func TestQuietFamilyIsReadAgain(t *testing.T) {
	for _, tt := range []struct {
		name   string
		act    func(*lab)
		within time.Duration
	}{
		{"events lost", func(l *lab) { l.table.Fail(ctguard.OpEvents, ctguard.ErrEventsLost) }, time.Millisecond},
		{"subscription broken", func(l *lab) { l.table.Fail(ctguard.OpEvents, errors.New("broken")) }, 2 * time.Second},
		{"subscription broken for good", func(l *lab) {
			errs := make([]error, 100)
			for i := range errs {
				errs[i] = errors.New("no subscription")
			}
			l.table.Fail(ctguard.OpSubscribe, errs...)
			l.table.Fail(ctguard.OpEvents, errors.New("broken"))
		}, 2 * time.Second},
		{"news", func(l *lab) { l.guard.Update(dualStack(podA, pod6)) }, time.Millisecond},
		{"time", func(*lab) {}, 2*time.Minute + 30*time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := start(t, &ctguardtest.Table{}, nil)
				l.add(flow(1, vip, podA))
				l.guard.Update(dualStack(podA, podB, pod6, gone6))
				time.Sleep(time.Minute)
				l.guard.Update(dualStack(podA, podB, pod6))
				time.Sleep(65 * time.Second)
				// As if events had been off for a moment.
				l.table.Set(flow6(6, vip6, gone6))
				time.Sleep(time.Second)
				l.wantFlows(1, 6)
				tt.act(l)
				time.Sleep(tt.within)
				l.wantFlows(1)
				l.wantPurges("6 endpoint-gone")
			})
		})
	}
}
