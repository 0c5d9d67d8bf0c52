package iptables

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	rtnl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// BenchmarkRules measures what a query and an answer cost the kernel from
// socket to socket: on a veth all of it runs in the sender's thread, whose
// processor time is reported. Variants take turns within each round, and the
// medians of a run are compared: the machine is never the same twice. The
// first has no rules of ours, the address on the loopback device and
// connection tracking, as NodeLocal DNSCache would have without NOTRACK.
// Run with -benchtime 40x or more.
func BenchmarkRules(b *testing.B) {
	const sends = 2000 // of each kind, a variant and round
	rs, err := NewRuleSet(withProbe(clusterIPConfig()))
	if err != nil {
		b.Fatal(err)
	}
	without := func(drop func(statement) bool) *table {
		t := rs.process(false)
		for i, c := range t.chains {
			t.chains[i].rules = slices.DeleteFunc(slices.Clone(c.rules), func(r rule) bool { return slices.ContainsFunc(r, drop) })
		}
		return &t
	}
	updates := func(set string) func(statement) bool {
		return func(s statement) bool { u, ok := s.(updateSet); return ok && u.set == set }
	}
	all := rs.process(false)
	variants := []struct {
		name  string
		table *table // nil: no rules
	}{
		{"no rules", nil},
		{"all rules", &all},
		{"taken not counted", without(updates(setName(setTaken, 0)))},
		{"no answer renews", without(updates(setName(setAlive, 0)))},
		{"every answer renews", without(func(s statement) bool { _, ok := s.(unlucky); return ok })},
	}

	l := labtest.New(b)
	pod := labtest.AddPod(b, l, "client")
	conn := dialPath(b, l, pod)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	queries, answers := make([][]float64, len(variants)), make([][]float64, len(variants))
	for b.Loop() {
		for i, v := range variants {
			if err := l.Node.Do(func() error { return arrange(rs, v.table) }); err != nil {
				b.Fatal(err)
			}
			start := threadCPU(b)
			for range sends {
				_, _ = conn.client.Write(rs.cfg.Probe)
			}
			middle := threadCPU(b)
			for range sends {
				_, _ = conn.server.WriteToUDPAddrPort(rs.cfg.Probe, conn.from)
			}
			queries[i] = append(queries[i], float64(middle-start)/sends)
			answers[i] = append(answers[i], float64(threadCPU(b)-middle)/sends)
		}
	}
	for i, v := range variants {
		unit := strings.ReplaceAll(v.name, " ", "-")
		b.ReportMetric(median(queries[i]), unit+"-ns/query")
		b.ReportMetric(median(answers[i]), unit+"-ns/answer")
	}
}

// ends are the two sockets of a path.
type ends struct {
	server, client *net.UDPConn
	from           netip.AddrPort // the client's
}

func dialPath(b *testing.B, l *lab.Lab, pod *lab.Pod) (e ends) {
	b.Helper()
	err := l.Node.Do(func() error {
		s, err := Listen(b.Context(), vip4, ListenConfig{})
		if err != nil {
			return err
		}
		b.Cleanup(func() { _ = s.Close() })
		e.server = s.UDP[0]
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	c, err := pod.Dial(b.Context(), "udp", vip4.String())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	e.client = c.(*net.UDPConn)
	e.from = e.client.LocalAddr().(*net.UDPAddr).AddrPort()
	return e
}

// arrange makes the calling thread's namespace carry a table with everything
// alive; without one, the loopback device has the address.
func arrange(rs RuleSet, t *table) error {
	lo, err := rtnl.LinkByIndex(loopbackIndex)
	if err != nil {
		return err
	}
	address := &rtnl.Addr{IPNet: hostNet(vip4.Addr())}
	if _, err := (routing{}).prune(); err != nil {
		return err
	}
	if _, err := removeTables(func(i tableInfo) bool { return slotOf(i.name) >= 0 }); err != nil {
		return err
	}
	if t == nil {
		return rtnl.AddrReplace(lo, address)
	}
	if err := rtnl.AddrDel(lo, address); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return err
	}
	if _, _, err := rs.routing().ensure(); err != nil {
		return err
	}
	return withConn(func(c *netlink.Conn) error {
		var alive batch
		alive.assert(t)
		alive.change("add", unix.NFT_MSG_NEWSETELEM, netlink.Create, t.name, setName(setAlive, 0),
			[]element{{key: serviceKey(Service{vip4, UDP}), timeout: time.Hour}})
		return alive.commit(c)
	})
}

// threadCPU is the processor time of the calling thread, the kernel's included.
func threadCPU(b *testing.B) time.Duration {
	b.Helper()
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &ru); err != nil {
		b.Fatal(err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

// BenchmarkStatements measures what single parts of the rules cost, by putting
// many copies of one in a query's way. Run with -benchtime 25x or more.
func BenchmarkStatements(b *testing.B) {
	const copies, sends = 60, 1500
	rs, err := NewRuleSet(withProbe(clusterIPConfig()))
	if err != nil {
		b.Fatal(err)
	}
	to, client := []field{daddr, l4proto, dport}, []field{saddr, l4proto}
	parts := []struct {
		name string
		rule rule
	}{
		{"nothing", nil},
		{"port", rule{isPort{field: dport, port: 54}, done()}},
		{"mark", rule{isMark{rs.cfg.Mark, rs.cfg.taken()}, done()}},
		{"alive-hit", rule{inSet{0, to, setName(setAlive, 0)}}},
		{"bypass-miss", rule{inSet{0, client, setName(setBypass, 0)}, back()}},
		{"exclude-miss", rule{inSet{0, client[:1], setName(setExclude, 0)}, back()}},
		{"socket", rule{hasSocket{}}},
		{"count-taken", rule{updateSet{fam: 0, fields: client, set: setName(setTaken, 0), count: true}}},
		{"renew-alive", rule{updateSet{fam: 0, fields: to, set: setName(setAlive, 0), timeout: time.Minute}}},
		{"set-mark", rule{setMark{rs.cfg.taken()}}},
	}
	l := labtest.New(b)
	conn := dialPath(b, l, labtest.AddPod(b, l, "client"))

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	costs := make([][]float64, len(parts))
	for b.Loop() {
		for i, p := range parts {
			t := rs.process(false)
			for j, c := range t.chains {
				t.chains[j].rules = nil
				if c.name == "prerouting" && p.rule != nil {
					t.chains[j].rules = slices.Repeat([]rule{p.rule}, copies)
				}
			}
			if err := l.Node.Do(func() error { return arrange(rs, &t) }); err != nil {
				b.Fatal(err)
			}
			start := threadCPU(b)
			for range sends {
				_, _ = conn.client.Write(rs.cfg.Probe)
			}
			costs[i] = append(costs[i], float64(threadCPU(b)-start)/sends)
		}
	}
	nothing := median(costs[0])
	for i, p := range parts[1:] {
		b.ReportMetric((median(costs[i+1])-nothing)/copies, p.name+"-ns")
	}
}
