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
// socket to socket: on a veth all of it runs in the sender's thread, which
// receives as well, and whose processor time is reported. Variants take turns
// in short rounds, and their quiet moments are compared: the machine is never the
// same twice. The yardsticks have the address on the loopback device:
// without anything, as on a machine that is nobody's node; with connection
// tracking, as clients have it on kube-proxy's path; and with NOTRACK, as
// NodeLocal DNSCache does it.
// Run with -benchtime 100x or more.
func BenchmarkRules(b *testing.B) {
	const batches, size = 16, 50 // that fit into a receive buffer
	rs, err := NewRuleSet(withProbe(clusterIPConfig()))
	if err != nil {
		b.Fatal(err)
	}
	rs.bypassing = false // as it is where no client is let past
	previous := rs
	previous.lookupCounts = false
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
	bypassing := rs
	bypassing.bypassing = true
	withBypass, beforeCounts := bypassing.process(false), previous.process(false)
	// The least that leads a query to us, whatever else there is.
	least := rs.process(false)
	for i, c := range least.chains {
		switch least.chains[i].rules = nil; c.name {
		case "prerouting":
			least.chains[i].rules = []rule{{isPort{field: dport, port: dnsPort}, notrack{}, setMark{rs.cfg.taken()}}}
		case "output":
			least.chains[i].rules = []rule{{isPort{field: sport, port: dnsPort}, notrack{}}}
		}
	}
	nothing, tracked, nodeLocal := table{name: tableName(0)}, table{name: tableName(0)}, table{name: tableName(0)}
	nodeLocal.chains = least.chains // no tracking (and a mark that nobody minds)
	// What the fallback of link-local addresses adds, which acts on none of this.
	withFallback := rs.process(false)
	for _, c := range fallbackChains(b) {
		if c.hook != nil {
			c.name = "fallback-" + c.name
		}
		withFallback.chains = append(withFallback.chains, c)
	}
	variants := []struct {
		name    string
		table   *table
		address bool // on the loopback device
	}{
		{"nothing", &nothing, true},
		{"tracked", &tracked, true},
		{"as NodeLocal", &nodeLocal, true},
		{"least", &least, false},
		{"all rules", &all, false},
		{"with bypass", &withBypass, false},
		{"with fallback", &withFallback, false},
		{"before 5.7", &beforeCounts, false},
		{"no answer renews", without(updates(setName(setAlive, 0))), false},
	}
	for _, v := range variants[1:] { // as on a node, connection tracking is on
		v.table.chains = append(slices.Clip(v.table.chains), accountingTable(0, false).chains...)
	}

	l := labtest.New(b)
	pod := labtest.AddPod(b, l, "client")
	conn := dialPath(b, l, pod)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	queries, answers := make([][]float64, len(variants)), make([][]float64, len(variants))
	buf, message, id := make([]byte, 512), slices.Clone(rs.cfg.Probe), byte(0)
	next := func() []byte { // answers renew by their ids
		id++
		message[1] = id
		return message
	}
	for b.Loop() {
		for i, v := range variants {
			if err := l.Node.Do(func() error { return arrange(rs, v.table, v.address) }); err != nil {
				b.Fatal(err)
			}
			for range batches {
				start := threadCPU(b)
				for range size {
					_, _ = conn.client.Write(next())
				}
				for range size {
					if _, _, err := conn.server.ReadFromUDPAddrPort(buf); err != nil {
						b.Fatalf("%s: a query is lost: %v", v.name, err)
					}
				}
				middle := threadCPU(b)
				for range size {
					_, _ = conn.server.WriteToUDPAddrPort(next(), conn.from)
				}
				for range size {
					if _, err := conn.client.Read(buf); err != nil {
						b.Fatalf("%s: an answer is lost: %v", v.name, err)
					}
				}
				queries[i] = append(queries[i], float64(middle-start)/size)
				answers[i] = append(answers[i], float64(threadCPU(b)-middle)/size)
			}
		}
	}
	for i, v := range variants {
		unit := strings.ReplaceAll(v.name, " ", "-")
		query, answer := quiet(queries[i]), quiet(answers[i])
		if i > 0 {
			unit, query, answer = unit+"-more", query-quiet(queries[0]), answer-quiet(answers[0])
		}
		b.ReportMetric(query, unit+"-ns/query")
		b.ReportMetric(answer, unit+"-ns/answer")
	}
}

func fallbackChains(b *testing.B) []chain {
	b.Helper()
	rs, err := NewRuleSet(withProbe(testConfig()))
	if err != nil {
		b.Fatal(err)
	}
	t, ok := rs.fallback()
	if !ok {
		b.Fatal("no fallback")
	}
	return t.chains
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
	for _, c := range []*net.UDPConn{e.server, e.client} { // what is lost ends the benchmark
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Minute)); err != nil {
			b.Fatal(err)
		}
	}
	e.from = e.client.LocalAddr().(*net.UDPAddr).AddrPort()
	return e
}

// arrange makes the calling thread's namespace carry a table with everything
// alive. If the address is on the loopback device, there is no routing of ours.
func arrange(rs RuleSet, t *table, address bool) error {
	lo, err := rtnl.LinkByIndex(loopbackIndex)
	if err != nil {
		return err
	}
	addr := &rtnl.Addr{IPNet: hostNet(vip4.Addr())}
	if _, err := (routing{}).prune(); err != nil {
		return err
	}
	if _, err := removeTables(func(i tableInfo) bool { return slotOf(i.name) >= 0 }); err != nil {
		return err
	}
	if address {
		err = rtnl.AddrReplace(lo, addr)
	} else if err = rtnl.AddrDel(lo, addr); err == nil || errors.Is(err, unix.EADDRNOTAVAIL) {
		_, _, err = rs.routing().ensure()
	}
	if err != nil {
		return err
	}
	return withConn(func(c *netlink.Conn) error {
		var alive batch
		alive.assert(t)
		if slices.ContainsFunc(t.sets, func(s set) bool { return s.name == setName(setAlive, 0) }) {
			alive.change("add", unix.NFT_MSG_NEWSETELEM, netlink.Create, t.name, setName(setAlive, 0),
				[]element{{key: serviceKey(Service{vip4, UDP}), timeout: time.Hour}, {key: serviceKey(Service{vip4, TCP}), timeout: time.Hour}})
		}
		return alive.commit(c)
	})
}

// threadCPU is the processor time of the calling thread, the kernel's included,
// to the nanosecond: getrusage(2) moves on with the scheduler's tick.
func threadCPU(b *testing.B) time.Duration {
	b.Helper()
	var at unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &at); err != nil {
		b.Fatal(err)
	}
	return time.Duration(at.Nano())
}

// quiet is the time that a batch takes when others leave the machine's caches
// alone: a tenth of the batches take less.
func quiet(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/10]
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
		{"put-taken", rule{updateSet{fam: 0, fields: client, set: setName(setTaken, 0), count: true}}},
		{"look-taken-up", rule{inSet{0, client, setName(setTaken, 0)}}}, // counts it
		{"unlucky", rule{unlucky{renewOneIn}}},
		{"leaves-node", rule{leavesNode{}}},
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
			if err := l.Node.Do(func() error { return arrange(rs, &t, false) }); err != nil {
				b.Fatal(err)
			}
			start := threadCPU(b)
			for range sends {
				_, _ = conn.client.Write(rs.cfg.Probe)
			}
			costs[i] = append(costs[i], float64(threadCPU(b)-start)/sends)
		}
	}
	nothing := quiet(costs[0])
	for i, p := range parts[1:] {
		b.ReportMetric((quiet(costs[i+1])-nothing)/copies, p.name+"-ns")
	}
}
