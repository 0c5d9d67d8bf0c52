package ctguard_test

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

// contract is what a table promises, be it the kernel's or the one for tests.
type contract interface {
	ctguard.Table
	ctguard.Events
	ctguard.Host
}

// bothTables runs a test on both. add makes entries.
func bothTables(t *testing.T, test func(t *testing.T, table contract, add func(...ctguard.Flow))) {
	t.Helper()
	t.Run("kernel", func(t *testing.T) {
		k, add := ctguard.NewNamespaceKernel(t)
		test(t, k, add)
	})
	t.Run("ctguardtest", func(t *testing.T) {
		table := &ctguardtest.Table{}
		test(t, table, func(fs ...ctguard.Flow) {
			for _, f := range fs {
				if err := table.Add(f); err != nil {
					t.Fatal(err)
				}
			}
		})
	})
}

const (
	vip6 = "[fd00:10:96::a]:53"
	pod6 = "[fd00:10:244::3]:5353"
)

func flow6(client int, frontend, endpoint string) ctguard.Flow {
	f := flow(client, frontend, endpoint)
	c := netip.AddrPortFrom(netip.MustParseAddr("fd00:10:244:1::1"), uint16(client))
	f.Orig.Src, f.Reply.Dst = c, c
	return f
}

// read collects the flows of the matches.
func read(t *testing.T, table ctguard.Table, ms ...ctguard.Match) []ctguard.Flow {
	t.Helper()
	var fs []ctguard.Flow
	for f, err := range table.Flows(t.Context(), ms) {
		if err != nil {
			t.Fatal(err)
		}
		fs = append(fs, f)
	}
	return fs
}

// diffFlows compares without regard to order and time.
func diffFlows(want, got []ctguard.Flow) string {
	return cmp.Diff(want, got,
		cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
		cmpopts.IgnoreFields(ctguard.Flow{}, "Remaining", "Start", "Packets", "Replies"),
		cmpopts.SortSlices(func(a, b ctguard.Flow) bool { return a.String() < b.String() }),
		cmpopts.EquateEmpty())
}

func TestContractFlows(t *testing.T) {
	zoned, origZoned := flow(3, vip, podA), flow(4, vip, podA)
	zoned.Zone, origZoned.Orig.Zone = 7, 5353
	all := []ctguard.Flow{
		flow(1, vip, podA), flow(2, vip, podB), zoned, origZoned, flow(5, "10.96.0.11:53", podA), flow(6, "10.96.0.10:54", podA),
		flow6(1, vip6, pod6), flow6(2, "[fd00:10:96::b]:53", pod6),
	}
	bothTables(t, func(t *testing.T, table contract, add func(...ctguard.Flow)) {
		add(all...)
		for _, tt := range []struct {
			name    string
			matches []ctguard.Match
			want    []ctguard.Flow
		}{
			{"none", nil, nil},
			{"a frontend, in all zones", []ctguard.Match{{Dst: addr(vip)}}, []ctguard.Flow{all[0], all[1], zoned, origZoned}},
			{"a frontend and an endpoint", []ctguard.Match{{Dst: addr(vip), Src: addr(podB)}}, []ctguard.Flow{all[1]}},
			{"IPv6", []ctguard.Match{{Dst: addr(vip6)}}, []ctguard.Flow{all[6]}},
			{"two matches", []ctguard.Match{{Dst: addr(vip), Src: addr(podB)}, {Dst: addr(vip6)}}, []ctguard.Flow{all[1], all[6]}},
			{"any address", []ctguard.Match{{Dst: addr("0.0.0.0:53")}}, []ctguard.Flow{all[0], all[1], zoned, origZoned, all[4]}},
			{"any IPv6 address", []ctguard.Match{{Dst: addr("[::]:53")}}, []ctguard.Flow{all[6], all[7]}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				if diff := diffFlows(tt.want, read(t, table, tt.matches...)); diff != "" {
					t.Errorf("flows (-want +got):\n%s", diff)
				}
			})
		}
	})
}

func TestContractDelete(t *testing.T) {
	stale, moved := flow(40000, vip, podA), flow(40000, vip, podB)
	zoned, origZoned := stale, flow(40001, vip, podA)
	zoned.Zone, origZoned.Orig.Zone = 7, 5353
	remapped := flow(40002, vip, podA)
	remapped.Reply.Dst = addr("10.0.0.1:14548")
	six := flow6(40000, vip6, pod6)
	for _, tt := range []struct {
		name    string
		table   []ctguard.Flow
		delete  []ctguard.Flow
		removed []bool
		want    []ctguard.Flow
	}{
		{"nothing", []ctguard.Flow{stale}, nil, []bool{}, []ctguard.Flow{stale}},
		{"there", []ctguard.Flow{stale}, []ctguard.Flow{stale}, []bool{true}, nil},
		{"gone already", nil, []ctguard.Flow{stale}, []bool{false}, nil},
		{"moved to a living endpoint", []ctguard.Flow{moved}, []ctguard.Flow{stale}, []bool{false}, []ctguard.Flow{moved}},
		{"IPv6", []ctguard.Flow{six}, []ctguard.Flow{six}, []bool{true}, nil},
		{"reply port remapped", []ctguard.Flow{remapped}, []ctguard.Flow{remapped}, []bool{true}, nil},
		{"its own zone only", []ctguard.Flow{stale, zoned}, []ctguard.Flow{zoned}, []bool{true}, []ctguard.Flow{stale}},
		{"default zone only", []ctguard.Flow{stale, zoned}, []ctguard.Flow{stale}, []bool{true}, []ctguard.Flow{zoned}},
		{"zone of the original direction", []ctguard.Flow{origZoned}, []ctguard.Flow{origZoned}, []bool{true}, nil},
		{"twice", []ctguard.Flow{stale}, []ctguard.Flow{stale, stale}, []bool{true, false}, nil},
		{"some of many", []ctguard.Flow{stale, six, origZoned}, []ctguard.Flow{moved, six, stale}, []bool{false, true, true}, []ctguard.Flow{origZoned}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bothTables(t, func(t *testing.T, table contract, add func(...ctguard.Flow)) {
				add(tt.table...)
				removed, err := table.Delete(t.Context(), tt.delete)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(removed, tt.removed) {
					t.Errorf("removed %v, want %v", removed, tt.removed)
				}
				left := read(t, table, ctguard.Match{Dst: addr(vip)}, ctguard.Match{Dst: addr(vip6)})
				if diff := diffFlows(tt.want, left); diff != "" {
					t.Errorf("left in the table (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestContractDeleteMatching(t *testing.T) {
	bothTables(t, func(t *testing.T, table contract, add func(...ctguard.Flow)) {
		keep := []ctguard.Flow{flow(2, vip, podB), flow(3, "10.96.0.11:53", podA), flow6(1, vip6, pod6)}
		zoned := flow(4, vip, podA)
		zoned.Zone = 7
		add(append(keep, flow(1, vip, podA), zoned)...)
		for _, wide := range []ctguard.Match{{}, {Dst: addr(vip)}, {Dst: addr("0.0.0.0:53"), Src: addr(podA)}, {Src: addr(podA)}} {
			if err := table.DeleteMatching(t.Context(), wide); err == nil {
				t.Errorf("DeleteMatching(%v): no error", wide)
			}
		}
		// The kernel's filter cannot do IPv6.
		if err := table.DeleteMatching(t.Context(), ctguard.Match{Dst: addr(vip6), Src: addr(pod6)}); !errors.Is(err, ctguard.ErrNotSupported) {
			t.Errorf("IPv6: %v", err)
		}
		if err := table.DeleteMatching(t.Context(), ctguard.Match{Dst: addr(vip), Src: addr(podA)}); err != nil {
			t.Fatal(err)
		}
		left := read(t, table, ctguard.Match{Dst: addr("0.0.0.0:53")}, ctguard.Match{Dst: addr("[::]:53")})
		if diff := diffFlows(keep, left); diff != "" {
			t.Errorf("left in the table (-want +got):\n%s", diff)
		}
	})
}

func TestContractSubscribe(t *testing.T) {
	bothTables(t, func(t *testing.T, table contract, add func(...ctguard.Flow)) {
		add(flow(1, vip, podA)) // before
		s, err := table.Subscribe([]uint16{53, 5300})
		if err != nil {
			t.Fatal(err)
		}
		want := []ctguard.Flow{flow(2, vip, podA), flow6(3, vip6, pod6), flow(4, "10.96.0.10:5300", podB)}
		add(want[0], flow(9, "10.96.0.10:54", podA), want[1], flow6(9, "[fd00:10:96::a]:54", pod6), want[2])
		late := time.AfterFunc(10*time.Second, func() { _ = s.Close() })
		defer late.Stop()
		var got []ctguard.Flow
		for range want {
			f, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, f)
		}
		if diff := diffFlows(want, got); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		waiting := make(chan error)
		go func() {
			_, err := s.Next()
			waiting <- err
		}()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-waiting; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Next while Close: %v", err)
		}
		if _, err := s.Next(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Next after Close: %v", err)
		}
	})
}

func TestContractHost(t *testing.T) {
	bothTables(t, func(t *testing.T, table contract, _ func(...ctguard.Flow)) {
		got, err := table.Timeouts()
		if err != nil || got != ctguard.DefaultTimeouts() {
			t.Errorf("timeouts %v, %v", got, err)
		}
		servers, err := table.VirtualServers()
		if err != nil || len(servers) != 0 {
			t.Errorf("virtual servers %v, %v", servers, err)
		}
	})
}
