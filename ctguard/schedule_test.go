package ctguard_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

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

// TestBurstOfUpdates: sweeps do not take all of the time, however many updates
// come, and the last update is not missed.
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
		if n := l.table.Requests().Dumps; n > 19 {
			t.Errorf("%d sweeps of 50 ms in 1.15 s", n)
		}
	})
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
		time.Sleep(607 * time.Second)
		if n := l.table.Requests().Dumps; n < 30 || n > 60 {
			t.Errorf("%d attempts in ten minutes", n)
		}
		if n := l.guard.Stats().Errors[ctguard.OpDump]; int(n) != l.table.Requests().Dumps {
			t.Errorf("%d errors counted", n)
		}
	})
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
