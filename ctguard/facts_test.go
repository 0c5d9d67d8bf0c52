package ctguard_test

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

func TestDeletedService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA))
		l.guard.Update(kubeDNS(podA))
		time.Sleep(67 * time.Second)
		l.guard.Update(&ctguard.Snapshot{})
		l.wantPurges("1 frontend-gone")

		// Rules that lag make it again: the next sweep has it.
		time.Sleep(100 * time.Millisecond)
		l.add(flow(2, vip, podA))
		l.wantPurges()
		time.Sleep(time.Second)
		l.wantPurges("2 frontend-gone")

		// Twice the longest timeout later, it is nobody's.
		time.Sleep(247 * time.Second)
		if n := l.guard.Stats().Gone; n != 0 {
			t.Errorf("%d tombstones after four minutes", n)
		}
		l.add(flow(3, vip, podA))
		time.Sleep(67 * time.Second)
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
		time.Sleep(67 * time.Second)
		l.guard.Update(&ctguard.Snapshot{})
		time.Sleep(10100 * time.Millisecond)
		l.add(flow(1, vip, podA))
		time.Sleep(247 * time.Second)
		l.wantPurges()
		l.wantFlows(1)
	})
}

func TestChangedClusterIP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, nil)
		l.add(flow(1, vip, podA), flow(2, "10.96.0.99:53", podA))
		l.guard.Update(kubeDNS(podA))
		time.Sleep(67 * time.Second)
		s := kubeDNS(podA)
		s.Services[0].Addrs = []netip.Addr{netip.MustParseAddr("10.96.0.99")}
		l.guard.Update(s)
		l.wantPurges("1 frontend-gone")
		l.wantFlows(2)

		// And back again: no tombstone remains.
		l.guard.Update(kubeDNS(podA))
		l.add(flow(3, vip, podA))
		time.Sleep(67 * time.Second)
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
		time.Sleep(607 * time.Second)
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
			time.Sleep(67 * time.Second)
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
		l.table.SetHost(ctguard.DefaultTimeouts(), addr(vip))
		l.add(flow(3, vip, podB))
		wantStates(ctguard.IPVS)
		l.wantPurges("1 untranslated", "3 endpoint-gone event")
		l.add(flow(4, vip, podB))
		l.wantPurges()
	})
}
