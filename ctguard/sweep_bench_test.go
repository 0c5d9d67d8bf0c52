package ctguard

import (
	"fmt"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// BenchmarkSweep compares, in one run, a whole sweep of the guard with the
// ways of others to look at the table: conntrack -L, and the full dump of
// vishvananda/netlink, which is what kube-proxy does at each sync. The table
// has 100 flows to kube-dns, of both families, among foreign ones:
//
//	go test ./ctguard -run '^$' -bench 'Sweep/' -benchtime 3x -timeout 20m
//
// A namespace holds at most nf_conntrack_max of the root namespace, 262,144 by
// default. The kernel has one hash table for all namespaces, and each walk goes
// over all of it; so of a million entries three quarters are in others.
//
// cpu-ms is user and system time of the process; with the guard, that is most
// of it the kernel's walk.
func BenchmarkSweep(b *testing.B) {
	for _, size := range []struct{ own, elsewhere int }{{10_000, 0}, {100_000, 0}, {240_000, 760_000}} {
		b.Run(fmt.Sprint(size.own+size.elsewhere), func(b *testing.B) {
			for left := size.elsewhere; left > 0; left -= 254_000 {
				newNamespace(b).fill(foreign(min(left, 254_000)))
			}
			n := newNamespace(b)
			n.fill(foreign(size.own))
			n.fill(frontendFlows(100, podA))
			b.Run("guard", func(b *testing.B) { benchSweep(b, n) })
			b.Run("conntrack", func(b *testing.B) { benchTool(b, n) })
			b.Run("netlink", func(b *testing.B) { benchLibrary(b, n) })
		})
	}
}

// cpuTime is the user and system time of this process, its thread or its children.
func cpuTime(who int) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(who, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// measured runs fn and reports what it costs.
func measured(b *testing.B, who int, fn func()) {
	b.Helper()
	b.ReportAllocs()
	before := cpuTime(who)
	for b.Loop() {
		fn()
	}
	b.ReportMetric(float64(cpuTime(who)-before)/1e6/float64(b.N), "cpu-ms/op")
}

func benchSweep(b *testing.B, n *namespace) {
	k := n.kernel()
	g, err := New(Config{Table: k, Host: k})
	if err != nil {
		b.Fatal(err)
	}
	r := &runner{Guard: g, followers: make(map[netip.AddrPort]*follower)}
	g.Update(snapshotOf(up(podA), up(podB)))
	before := k.Stats()
	measured(b, unix.RUSAGE_SELF, func() { r.sweep(b.Context()) })
	after, s := k.Stats(), g.Stats()
	if s.Flows[Live] != 100 || s.Sweeps != uint64(b.N) {
		b.Fatalf("%d flows in %d sweeps", s.Flows[Live], s.Sweeps)
	}
	b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(b.N), "netlink-B/op")
	b.ReportMetric(float64(after.Dumps-before.Dumps)/float64(b.N), "dumps/op")
}

func benchTool(b *testing.B, n *namespace) {
	path, err := exec.LookPath("conntrack")
	if err != nil {
		lacking(b, "needs the program conntrack")
	}
	measured(b, unix.RUSAGE_CHILDREN, func() {
		n.do(func() error { return exec.CommandContext(b.Context(), path, "-L").Run() })
	})
	reportFullDump(b, n)
}

func benchLibrary(b *testing.B, n *namespace) {
	h, err := vnetlink.NewHandleAt(netns.NsHandle(n.fd), unix.NETLINK_NETFILTER)
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	measured(b, unix.RUSAGE_SELF, func() {
		flows, err := h.ConntrackTableList(vnetlink.ConntrackTable, unix.AF_INET)
		if err != nil || len(flows) < 10_000 {
			b.Fatalf("%d flows, %v", len(flows), err)
		}
	})
	reportFullDump(b, n)
}

// reportFullDump reports what the kernel sends in a dump without a filter, which
// is what the two others ask for.
func reportFullDump(b *testing.B, n *namespace) {
	b.Helper()
	k := n.kernel()
	k.ignoresFilter.Store(true)
	before := k.Stats().Bytes
	for _, err := range k.Flows(b.Context(), []Match{match(vip4)}) {
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(k.Stats().Bytes-before), "netlink-B/op")
	b.ReportMetric(1, "dumps/op")
}
