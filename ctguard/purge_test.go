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

func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) { c.DryRun = true })
		l.add(flow(1, vip, podA), flow(2, vip, podB))
		// Of both families, since each is a part of its own.
		dual := kubeDNS(podB)
		dual.Services[0].Addrs = append(dual.Services[0].Addrs, netip.MustParseAddr("fd00:10:96::a"))
		l.guard.Update(dual)
		time.Sleep(607 * time.Second)
		l.wantPurges("1 endpoint-gone dry")
		l.add(flow(3, vip, podA))
		time.Sleep(607 * time.Second)
		l.wantPurges("3 endpoint-gone event dry")
		l.wantFlows(1, 2, 3)

		// What goes and comes back is reported again.
		if _, err := l.table.Delete(t.Context(), []ctguard.Flow{flow(3, vip, podA)}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(127 * time.Second)
		l.add(flow(3, vip, podA))
		time.Sleep(127 * time.Second)
		l.wantPurges("3 endpoint-gone event dry")
		s := l.guard.Stats()
		if r := l.table.Requests(); r.Deletes+r.DeleteMatching != 1 || len(s.Deleted) != 0 {
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

// TestMoreThanTheLimit: a message that deletes all flows of an endpoint is not
// sent if there are more of them than may be deleted at once; in the end, all go.
func TestMoreThanTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many, burst = 10_000, 6000
		l := start(t, &ctguardtest.Table{DumpTime: time.Millisecond}, func(c *ctguard.Config) {
			c.Limit = ctguard.Limit{PerSecond: 2000, Burst: burst}
		})
		for i := range many {
			l.table.Set(flow(i+1, vip, podA))
		}
		l.guard.Update(kubeDNS(podB))
		time.Sleep(500 * time.Millisecond)
		s := l.guard.Stats()
		if r := l.table.Requests(); r.DeleteMatching != 0 || s.Deleted[ctguard.EndpointGone] != burst || s.Refused != many-burst {
			t.Errorf("%+v; deleted %v, refused %d", r, s.Deleted, s.Refused)
		}
		time.Sleep(5 * time.Second)
		l.wantFlows()
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
