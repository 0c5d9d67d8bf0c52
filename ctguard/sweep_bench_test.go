package ctguard

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"testing"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// BenchmarkSweep compares whole sweeps of the guard, in each of which 100 stale
// flows among foreign ones are found and deleted, with the ways of others to look at
// the table:
//
//	go test ./ctguard -run '^$' -bench 'Sweep/' -benchtime 5x -timeout 20m
//
//	one        a sweep for a Service with an IPv4 address
//	both       the same for a dual-stack Service: the kernel's filter wants a family
//	stream     a full dump in the guard's own way, as on a kernel without a filter
//	conntrack  conntrack -L, in C, which also prints each entry
//	library    the full dump of vishvananda/netlink, which is what kube-proxy does
//
// They take turns, so that whatever else the machine does meets all of them. The
// figures are medians: user and system time of the process (with the guard, nearly
// all of it the kernel's walk), and what is read from netlink.
//
// A namespace holds at most nf_conntrack_max of the root namespace, 262,144 by
// default. The kernel has one hash table for all namespaces, and each walk goes
// over all of it; so of a million entries three quarters are in others. A full dump
// passes these by, so it is flattered; full-estimate is what conntrack -L would take
// if all were in one: the walk, and for each entry what it takes beyond the walk.
func BenchmarkSweep(b *testing.B) {
	for _, size := range []struct{ own, elsewhere int }{{10_000, 0}, {100_000, 0}, {240_000, 0}, {240_000, 760_000}} {
		b.Run(fmt.Sprint(size.own+size.elsewhere), func(b *testing.B) {
			for left := size.elsewhere; left > 0; left -= 254_000 {
				newNamespace(b).fill(foreign(min(left, 254_000)))
			}
			n := newNamespace(b)
			n.fill(foreign(size.own))
			benchSweep(b, n, size.own, size.own+size.elsewhere)
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

func benchSweep(b *testing.B, n *namespace, own, all int) {
	k := n.kernel()
	one := snapshotOf(up(podA), up(podB))
	one.Services[0].Addrs = one.Services[0].Addrs[:1]
	ways := []struct {
		name string
		who  int
		run  func()
	}{
		{"one", unix.RUSAGE_SELF, sweeper(b, n, k, one)},
		{"both", unix.RUSAGE_SELF, sweeper(b, n, k, snapshotOf(up(podA), up(podB)))},
		{"stream", unix.RUSAGE_SELF, func() { streamAll(b, k) }},
		{"conntrack", unix.RUSAGE_CHILDREN, conntrackTool(b, n)},
		{"library", unix.RUSAGE_SELF, libraryList(b, n)},
	}
	stale := frontendFlows(100, "10.244.0.9:5353")
	cpu, read := make(map[string][]float64), make(map[string]float64)
	for i := 0; b.Loop(); i++ {
		for j := range ways {
			w := ways[(i+j)%len(ways)] // nobody is always the first
			n.fill(stale)
			bytes, before := k.Stats().Bytes, cpuTime(w.who)
			w.run()
			cpu[w.name] = append(cpu[w.name], float64(cpuTime(w.who)-before)/1e6)
			read[w.name] = float64(k.Stats().Bytes - bytes)
			n.remove(k, stale)
			if left := n.entries(k); left != own {
				b.Fatalf("%d entries left of %d", left, own)
			}
		}
	}
	median := make(map[string]float64)
	for _, w := range ways {
		slices.Sort(cpu[w.name])
		median[w.name] = cpu[w.name][len(cpu[w.name])/2]
		b.ReportMetric(median[w.name], w.name+"-cpu-ms")
	}
	// What others read, the kernel sends in the same form.
	b.ReportMetric(read["both"], "both-B")
	b.ReportMetric(read["stream"], "full-B")
	b.ReportMetric(median["one"]/median["conntrack"], "one/conntrack")
	b.ReportMetric(median["both"]/median["conntrack"], "both/conntrack")
	full := median["one"] + (median["conntrack"]-median["one"])*float64(all)/float64(own)
	b.ReportMetric(full, "full-estimate-ms")
	b.ReportMetric(median["one"]/full, "one/full")
	b.ReportMetric(median["both"]/full, "both/full")
}

// sweeper returns a sweep that finds 100 stale flows and deletes them.
func sweeper(b *testing.B, n *namespace, k *Kernel, s *Snapshot) func() {
	b.Helper()
	g, err := New(Config{Table: k, Host: k})
	if err != nil {
		b.Fatal(err)
	}
	r := &runner{Guard: g, followers: make(map[netip.AddrPort]*follower)}
	g.Update(s)
	deleted := uint64(0)
	return func() {
		r.sweep(b.Context())
		if deleted += 100; g.Stats().Deleted[EndpointGone] != deleted {
			b.Fatalf("%d flows deleted, want %d", g.Stats().Deleted[EndpointGone], deleted)
		}
	}
}

// remove deletes what is left of some flows.
func (n *namespace) remove(k *Kernel, flows []Flow) {
	n.t.Helper()
	if _, err := k.Delete(n.t.Context(), flows); err != nil {
		n.t.Fatal(err)
	}
}

func streamAll(b *testing.B, k *Kernel) {
	b.Helper()
	defer k.ignoresFilter.Store(k.ignoresFilter.Swap(true))
	for _, err := range k.Flows(b.Context(), []Match{match(vip4), match(vip6)}) {
		if err != nil {
			b.Fatal(err)
		}
	}
}

func conntrackTool(b *testing.B, n *namespace) func() {
	b.Helper()
	path, err := exec.LookPath("conntrack")
	if err != nil {
		lacking(b, "needs the program conntrack")
	}
	return func() {
		n.do(func() error { return exec.CommandContext(b.Context(), path, "-L").Run() })
	}
}

func libraryList(b *testing.B, n *namespace) func() {
	b.Helper()
	h, err := vnetlink.NewHandleAt(netns.NsHandle(n.fd), unix.NETLINK_NETFILTER)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(h.Close)
	return func() {
		flows, err := h.ConntrackTableList(vnetlink.ConntrackTable, unix.AF_INET)
		if err != nil || len(flows) < 10_000 {
			b.Fatalf("%d flows, %v", len(flows), err)
		}
	}
}
