package ctguard

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

var compareAddrs = cmp.Options{
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmpopts.IgnoreFields(Flow{}, "Remaining", "Start", "Packets", "Replies"),
	cmpopts.EquateEmpty(),
}

func sorted(fs []Flow) []Flow {
	slices.SortFunc(fs, func(a, b Flow) int {
		return compareKeys(a, b)
	})
	return fs
}

func compareKeys(a, b Flow) int {
	for _, c := range []int{
		a.Orig.Src.Compare(b.Orig.Src), a.Orig.Dst.Compare(b.Orig.Dst),
		a.Reply.Src.Compare(b.Reply.Src), int(a.Proto) - int(b.Proto), int(a.OriginalZone()) - int(b.OriginalZone()),
	} {
		if c != 0 {
			return c
		}
	}
	return 0
}

// collect reads all flows of the matches.
func collect(t testing.TB, k *Kernel, ms ...Match) []Flow {
	t.Helper()
	var fs []Flow
	for f, err := range k.Flows(t.Context(), ms) {
		if err != nil {
			t.Fatal(err)
		}
		fs = append(fs, f)
	}
	return sorted(fs)
}

// collectAll reads the table without the kernel's filter.
func collectAll(t testing.TB, k *Kernel, ms ...Match) []Flow {
	t.Helper()
	old := k.ignoresFilter.Swap(true)
	defer k.ignoresFilter.Store(old)
	return collect(t, k, ms...)
}

const (
	vip4, vip6 = "10.96.0.10:53", "[fd00:10:96::a]:53"
	podA, podB = "10.244.0.3:5353", "10.244.0.4:5353"
	pod6       = "[fd00:10:244::3]:5353"
)

func match(dst string, src ...string) Match {
	m := Match{Dst: netip.MustParseAddrPort(dst)}
	if len(src) > 0 {
		m.Src = netip.MustParseAddrPort(src[0])
	}
	return m
}

// mixture is a table with everything in it that a filter could get wrong.
func mixture(n int) []Flow {
	flows := foreign(n)
	for i := range n / 10 {
		// Clients differ, since the reply tuples must.
		c4 := func(net int) string { return fmt.Sprintf("10.244.%d.%d:%d", net, i%250+1, 1024+i) }
		c6 := func(net int) string { return fmt.Sprintf("[fd00:10:244:%x::%x]:%d", net, i%250+1, 1024+i) }
		tcp := flow(c4(1), vip4, podA)
		tcp.Proto = unix.IPPROTO_TCP
		zoned := flow(c4(1), vip4, podA)
		zoned.Zone = 7
		origZoned := flow(c4(2), vip4, podB)
		origZoned.Orig.Zone = 5353
		flows = append(flows,
			flow(c4(1), vip4, podA),
			flow(c4(3), "10.96.0.11:53", podA),   // another Service
			flow(c4(4), "10.96.0.10:9153", podA), // another port of the Service
			flow(c4(5), vip4, podB),
			flow(c6(1), vip6, pod6),
			flow(c6(2), "[fd00:10:96::b]:53", pod6),
			tcp, zoned, origZoned,
		)
	}
	return flows
}

func TestKernelFilteredDumpEqualsFullDump(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	flows := mixture(4000)
	n.fill(flows)
	for _, tt := range []struct {
		name    string
		matches []Match
	}{
		{"IPv4 frontend", []Match{match(vip4)}},
		{"IPv6 frontend", []Match{match(vip6)}},
		{"both", []Match{match(vip4), match(vip6)}},
		{"frontend and endpoint", []Match{match(vip4, podA)}},
		{"IPv6 frontend and endpoint", []Match{match(vip6, pod6)}},
		{"any IPv4 address", []Match{match("0.0.0.0:53")}},
		{"any IPv6 address", []Match{match("[::]:53")}},
		{"any address and endpoint", []Match{match("0.0.0.0:53", podB)}},
		{"nothing there", []Match{match("10.96.0.12:53")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var want []Flow
			for _, f := range flows {
				if slices.ContainsFunc(tt.matches, func(m Match) bool { return m.Matches(f) }) {
					want = append(want, f)
				}
			}
			before := k.Stats().Bytes
			got := collect(t, k, tt.matches...)
			filtered := k.Stats().Bytes - before
			if diff := cmp.Diff(sorted(want), got, compareAddrs); diff != "" {
				t.Errorf("filtered dump (-want +got):\n%s", diff)
			}
			full := collectAll(t, k, tt.matches...)
			if diff := cmp.Diff(want, full, compareAddrs); diff != "" {
				t.Errorf("full dump (-want +got):\n%s", diff)
			}
			all := k.Stats().Bytes - before - filtered
			t.Logf("%d flows: %d bytes read with the kernel's filter, %d without", len(got), filtered, all)
		})
	}
	if k.ignoresFilter.Load() {
		lacking(t, "this kernel ignores CTA_FILTER")
	}
}

// TestKernelFilteredDumpPauses: the kernel walks no further than until a small
// datagram is full, before it gives the CPU to others.
func TestKernelFilteredDumpPauses(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	n.fill(foreign(1000))
	n.fill(frontendFlows(1000, podA))
	e := &countedEvents{Kernel: k}
	k.dial = func() (transport, error) {
		s, err := openSocket(k.ns)
		return countedTransport{s, e}, err
	}
	if got := len(collect(t, k, match(vip4))); got != 1000 {
		t.Fatalf("%d flows", got)
	}
	if k.ignoresFilter.Load() {
		lacking(t, "this kernel ignores CTA_FILTER")
	}
	least := int64(k.Stats().Bytes / filteredSize)
	if got := e.read.Load(); least < 10 || got <= least {
		t.Errorf("%d bytes in %d datagrams", k.Stats().Bytes, got)
	}
}

func TestKernelDeleteManyBatches(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	const many = 5*deleteBatch + 1
	var stale, missing []Flow
	for i := range many {
		stale = append(stale, flow(fmt.Sprintf("10.244.1.1:%d", 1024+i), vip4, podA))
		missing = append(missing, flow(fmt.Sprintf("10.244.1.2:%d", 1024+i), vip4, podA))
	}
	n.fill(stale)
	var mixed []Flow
	for i := range many {
		mixed = append(mixed, stale[i], missing[i])
	}
	removed, err := k.Delete(t.Context(), mixed)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range removed {
		if want := i%2 == 0; r != want {
			t.Fatalf("removed[%d] = %v for %v", i, r, mixed[i])
		}
	}
	if left := collect(t, k, match(vip4)); len(left) != 0 {
		t.Errorf("%d flows left", len(left))
	}
}

func TestKernelDeleteMatching(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	flows := mixture(2000)
	n.fill(flows)
	all := []Match{match("0.0.0.0:53"), match("[::]:53"), match("0.0.0.0:9153")}
	tcp := len(flows) - len(foreign(2000)) - len(collectAll(t, k, all...))
	before := collectAll(t, k, all...)
	// The kernel would delete every IPv6 flow but those that are meant.
	if err := k.DeleteMatching(t.Context(), match(vip6, pod6)); !errors.Is(err, ErrNotSupported) {
		t.Errorf("deletion by IPv6 filter: %v", err)
	}
	for _, m := range []Match{match(vip4, podA), match("10.96.0.11:53", podA)} {
		err := k.DeleteMatching(t.Context(), m)
		if errors.Is(err, ErrNotSupported) {
			lacking(t, "%v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		before = slices.DeleteFunc(before, m.Matches)
		if diff := cmp.Diff(before, collectAll(t, k, all...), compareAddrs); diff != "" {
			t.Errorf("after %v (-want +got):\n%s", m, diff)
		}
	}
	u, err := k.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if want := len(foreign(2000)) + tcp + len(before); int(u.Entries) != want {
		t.Errorf("%d entries left, want %d: foreign ones are gone", u.Entries, want)
	}
}

func TestKernelFlowsCanceled(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	n.fill(mixture(1000))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var err error
	for _, ferr := range k.Flows(ctx, []Match{match(vip4)}) {
		cancel()
		err = ferr
	}
	// A small table may have been read whole by then.
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	for _, err := range k.Flows(ctx, []Match{match(vip4)}) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("dump with a canceled context: %v", err)
		}
	}
	// Stopping in the middle harms nothing.
	for range k.Flows(t.Context(), []Match{match(vip4)}) {
		break
	}
	if got := len(collect(t, k, match(vip4))); got == 0 {
		t.Error("no flows")
	}
}

func TestKernelUsageAndTimeouts(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	n.fill(foreign(100))
	u, err := k.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.Entries != 100 || u.Limit == 0 {
		t.Errorf("usage %+v", u)
	}
	n.setSysctl("net/netfilter/nf_conntrack_udp_timeout", "31")
	n.setSysctl("net/netfilter/nf_conntrack_udp_timeout_stream", "182")
	got, err := k.Timeouts()
	if want := (Timeouts{31 * time.Second, 182 * time.Second}); err != nil || got != want {
		t.Errorf("timeouts %+v, %v; want %+v", got, err, want)
	}
	if vs, err := k.VirtualServers(); err != nil || len(vs) != 0 {
		t.Errorf("virtual servers %v, %v", vs, err)
	}
}
