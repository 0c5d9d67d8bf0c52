package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/miekg/dns"
	"github.com/ti-mo/conntrack"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// answerTime is a client's patience: every question has an answer within 1.8 s,
// and a busy machine some more.
const answerTime = 4 * time.Second

// reply asks a question and returns what comes back in time, whatever it is.
func (n *node) reply(network string, server netip.AddrPort, name string, qtype uint16) *dns.Msg {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), answerTime)
	defer cancel()
	start := time.Now()
	m, err := lab.Ask(ctx, n.pod.Namespace, network, server, name, qtype)
	if err != nil {
		n.t.Fatalf("no answer to %s: %v", name, err)
	}
	n.t.Logf("%s %s: %s, %d records, after %v", name, dns.TypeToString[qtype], dns.RcodeToString[m.Rcode], len(m.Answer), time.Since(start).Round(time.Millisecond))
	return m
}

// extendedError returns the code of an answer's extended error, or -1.
func extendedError(m *dns.Msg) int {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if ede, ok := o.(*dns.EDNS0_EDE); ok {
				return int(ede.InfoCode)
			}
		}
	}
	return -1
}

// TestNodeWithoutUpstreams: there is nobody to ask: no endpoints, or none that
// lives. What was known is answered, stale; what was not, SERVFAIL; all in time.
func TestNodeWithoutUpstreams(t *testing.T) {
	for name, fail := range map[string]func(*node) error{
		"no endpoints": func(n *node) error {
			n.tell(func(c *cluster) { c.leave(n.dns[0]); c.leave(n.dns[1]) })
			return n.DNS.SetEndpoints()
		},
		"all dead": func(n *node) error { return errors.Join(n.dns[0].Kill(), n.dns[1].Kill()) },
		"all silent": func(n *node) error {
			return errors.Join(n.dns[0].Server.SetFaults(lab.Faults{Silent: true}), n.dns[1].Server.SetFaults(lab.Faults{Silent: true}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.t = t
			d := n.start("a", `cache: {zones: {".": {positive: 1s}}}`)
			defer d.stop()
			const short = "soon.example.com."
			if m := n.reply("udp", clusterIP4, short, dns.TypeA); len(m.Answer) == 0 {
				t.Fatal("no answer in good times")
			}
			if err := fail(n); err != nil {
				t.Fatal(err)
			}
			<-time.After(1200 * time.Millisecond) // it expires
			if name == "no endpoints" {
				<-time.After(1300 * time.Millisecond) // and the daemon's own sockets, with their flows
			}
			if m := n.reply("udp", clusterIP4, short, dns.TypeA); m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0 || extendedError(m) != int(dns.ExtendedErrorCodeStaleAnswer) {
				t.Errorf("not a stale answer: %v", m)
			}
			if m := n.reply("udp", clusterIP4, "unknown.example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure || extendedError(m) < 0 {
				t.Errorf("not SERVFAIL with a reason: %v", m)
			}
			if d.metric("dnsguard_cache_hits_total", `kind="stale"`) == 0 {
				t.Error("stale answers are not counted")
			}
			if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") {
				t.Errorf("/readyz: %s", page) // kube-proxy's path has nobody either
			}
		})
	}
}

// TestNodeUpstreamTransports: a firewall lets only one transport through to the
// upstreams. All that fits is answered, and it is said which one is silent.
func TestNodeUpstreamTransports(t *testing.T) {
	for blocked, faults := range map[string]lab.Faults{"udp": {BlockUDP: true}, "tcp": {BlockTCP: true}} {
		t.Run(blocked+" blocked", func(t *testing.T) {
			n := newNode(t)
			n.t = t
			d := n.start("a")
			defer d.stop()
			for _, pod := range n.dns {
				if err := pod.Server.SetFaults(faults); err != nil {
					t.Fatal(err)
				}
			}
			if blocked == "tcp" { // nobody uses it before there is need
				if m := n.reply("tcp", clusterIP4, "text.example.com.", dns.TypeTXT); m.Rcode != dns.RcodeServerFailure {
					t.Errorf("an answer that nobody can have had: %v", m)
				}
			}
			for i := range 30 {
				m := n.reply("udp", clusterIP4, fmt.Sprintf("n%d.uncached.example.com.", i), dns.TypeA)
				// The first questions find out.
				if i >= 5 && len(m.Answer) == 0 {
					t.Errorf("question %d: %v", i, m)
				}
			}
			if blocked == "udp" {
				d.awaitLog("upstream does not answer", "transport=udp")
				if m := n.reply("tcp", clusterIP4, "text.example.com.", dns.TypeTXT); len(m.Answer) == 0 {
					t.Errorf("a large answer: %v", m)
				}
			}
			if got := d.metric("dnsguard_upstream_failures_total"); got == 0 {
				t.Error("failures are not counted")
			}
			for _, pod := range n.dns {
				if err := pod.Server.SetFaults(lab.Faults{}); err != nil {
					t.Fatal(err)
				}
			}
			await(t, "large answers again", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), answerTime)
				defer cancel()
				m, err := lab.Ask(ctx, n.pod.Namespace, "tcp", clusterIP4, "text.example.com.", dns.TypeTXT)
				return err == nil && len(m.Answer) > 0
			})
		})
	}
}

// TestNodeGarbage: an upstream answers everything with what is no answer. Its
// questions fail in time, none of it is believed, others are answered, and nothing
// of it stays.
func TestNodeGarbage(t *testing.T) {
	n := newNode(t)
	h := n.addHostile()
	d := n.start("a", h.upstreams())
	defer d.stop()
	before := d.footprint()
	garbage := &stream{name: "garbage", ns: n.pod.Namespace, load: lab.Load{
		Server: clusterIP4, Rate: 200, Queries: 600, Sockets: 4, Names: []string{"garbage." + hostileZone}, Unique: true, Timeout: answerTime,
	}}
	others := &stream{name: "others", ns: n.pod.Namespace, load: lab.Load{
		Server: clusterIP4, Rate: 100, Queries: 300, Sockets: 4, Names: []string{"uncached.example.com."}, Unique: true, Timeout: answerTime,
	}}
	drive(t, []*stream{garbage, others})()
	if r := garbage.result; r.Answered+r.Wrong+r.Lost > 0 {
		t.Errorf("garbage was believed, or left unanswered: %v", r)
	}
	if r := others.result; r.Failed() > 0 {
		t.Errorf("questions to another upstream failed: %v", r)
	}
	if h.asked.Load() == 0 || d.metric("dnsguard_upstream_failures_total", h.addr.String()) == 0 {
		t.Error("the hostile upstream was not asked, or its failures are not counted")
	}
	d.settles(t, before)
}

// TestNodeServiceMoves: the DNS Service is made anew with other addresses, as when
// somebody deletes and applies it. The new address is intercepted and asked.
func TestNodeServiceMoves(t *testing.T) {
	n := newNode(t)
	d := n.start("a")
	defer d.stop()
	moved := netip.MustParseAddrPort("10.96.0.99:53")
	s, err := n.Node.Proxy.AddService("moved", moved)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.SetEndpoints(lab.Endpoints(n.dns...)...), n.DNS.SetEndpoints()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(n.clusterFile())
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.ReplaceAll(text, []byte(clusterIP4.Addr().String()+`", "`+clusterIP6.Addr().String()), []byte(moved.Addr().String()))
	text = bytes.ReplaceAll(text, []byte("clusterIP: "+clusterIP4.Addr().String()), []byte("clusterIP: "+moved.Addr().String()))
	if err := os.WriteFile(n.clusterFile(), text, 0o600); err != nil {
		t.Fatal(err)
	}
	took := await(t, "the new address to be active", func() bool {
		return d.metric("dnsguard_intercept_active", fmt.Sprintf("address=%q", moved)) == 1
	})
	t.Logf("taken %v after the news", took)
	if !n.taken(n.pod, moved) {
		t.Error("queries to the new address are not taken")
	}
	// The forwarder asks the new address: the old one has no endpoints any more.
	await(t, "unknown names to be answered", func() bool {
		return n.ask(n.pod.Namespace, "udp", moved, fmt.Sprintf("n%d.uncached.example.com.", time.Now().UnixNano())) == nil
	})
	await(t, "the old address to be given up", func() bool {
		return d.metric("dnsguard_intercept_active", fmt.Sprintf("address=%q", clusterIP4)) == 0
	})
	if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") {
		t.Errorf("/readyz: %s", page)
	}
}

// TestNodeConntrackFull: the node's connection tracking table is full of
// connections that the kernel may not drop. What is known is answered, since taken
// packets are not tracked; unknown names fail in time, and are answered as soon as
// there is room.
func TestNodeConntrackFull(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	d := n.start("a", "timeouts: {total: 1500ms}")
	defer d.stop()
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Fatal(err)
	}
	limit := int(d.metric("dnsguard_conntrack_limit"))
	if limit == 0 || limit > 600_000 {
		labtest.Missing(t, fmt.Errorf("a table of %d entries takes too long to fill", limit))
	}
	start := time.Now()
	table := n.conntrack()
	n.fillConntrack(0, limit)
	t.Logf("%d entries made in %v", limit, time.Since(start))
	<-time.After(2500 * time.Millisecond) // the daemon's own sockets age, and their entries with them
	hot := n.hotLoad(n.pod, false, 200, 2*time.Second)
	if lost := drive(t, []*stream{hot})(); lost > 0 {
		t.Errorf("%d of what is known were lost", lost)
	}
	n.fillConntrack(limit, 1000) // in the place of what has ended meanwhile
	failed := 0
	for i := range 3 {
		if m := n.reply("udp", clusterIP4, fmt.Sprintf("full%d.uncached.example.com.", i), dns.TypeA); len(m.Answer) == 0 {
			failed++
		}
	}
	t.Logf("%d of 3 unknown names failed; %v upstream failures of this machine; conntrack_entries %v of %v", failed, d.metric("dnsguard_upstream_failures_total", `reason="local"`), d.metric("dnsguard_conntrack_entries"), limit)
	if failed == 0 {
		t.Error("no name failed: the table was not full")
	}
	if got := d.metric("dnsguard_conntrack_entries"); got < float64(limit)*0.99 {
		t.Errorf("%v entries are told of %d", got, limit)
	}
	if err := table.Flush(); err != nil {
		t.Fatal(err)
	}
	took := await(t, "unknown names to be answered", func() bool {
		return n.ask(n.pod.Namespace, "udp", clusterIP4, fmt.Sprintf("n%d.uncached.example.com.", time.Now().UnixNano())) == nil
	})
	t.Logf("answered %v after there was room", took)
}

// conntrack opens the node's table.
func (n *node) conntrack() (table *conntrack.Conn) {
	n.t.Helper()
	err := n.Node.Do(func() (err error) {
		table, err = conntrack.Dial(nil)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { table.Close() })
	return table
}

// fillConntrack fills the table with established flows between others, many to a
// message: one at a time takes longer than all else here.
func (n *node) fillConntrack(from, count int) {
	n.t.Helper()
	var conn *netlink.Conn
	err := n.Node.Do(func() (err error) {
		conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	var batch []netlink.Message
	for i := from; i < from+count; i++ { // errors are told to whoever reads them: it is full
		src := netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)})
		batch = append(batch, assuredFlow(n.t, netip.AddrPortFrom(src, uint16(1024+i&0xff)), netip.MustParseAddrPort("192.0.2.1:443")))
		if len(batch) < 256 && i < from+count-1 {
			continue
		}
		if _, err := conn.SendMessages(batch); err != nil {
			n.t.Fatal(err)
		}
		batch = batch[:0]
	}
}

// assuredFlow is the request for a UDP flow that the kernel does not drop early
// (linux/netfilter/nfnetlink_conntrack.h).
func assuredFlow(t *testing.T, src, dst netip.AddrPort) netlink.Message {
	nested := func(kind uint16, children ...netfilter.Attribute) netfilter.Attribute {
		return netfilter.Attribute{Type: kind, Nested: true, Children: children}
	}
	port := func(kind, port uint16) netfilter.Attribute {
		return netfilter.Attribute{Type: kind, Data: netfilter.Uint16Bytes(port)}
	}
	tuple := func(kind uint16, from, to netip.AddrPort) netfilter.Attribute {
		return nested(kind,
			nested(1, netfilter.Attribute{Type: 1, Data: from.Addr().AsSlice()}, netfilter.Attribute{Type: 2, Data: to.Addr().AsSlice()}),
			nested(2, netfilter.Attribute{Type: 1, Data: []byte{unix.IPPROTO_UDP}}, port(2, from.Port()), port(3, to.Port())))
	}
	const status = conntrack.StatusSeenReply | conntrack.StatusAssured | conntrack.StatusConfirmed
	m, err := netfilter.MarshalNetlink(
		netfilter.Header{SubsystemID: netfilter.NFSubsysCTNetlink, Family: netfilter.ProtoIPv4, Flags: netlink.Request | netlink.Create | netlink.Excl},
		[]netfilter.Attribute{
			tuple(1, src, dst), tuple(2, dst, src),
			{Type: 3, Data: netfilter.Uint32Bytes(uint32(status))},
			{Type: 7, Data: netfilter.Uint32Bytes(600)},
		})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestNodeDescriptors: the process has no descriptor left. UDP goes on; TCP does
// when connections have ended.
func TestNodeDescriptors(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	hoarder := labtest.AddPod(t, n.Lab, "hoarder")
	from := n.manyAddresses(hoarder)
	n.exe = built(t)
	const limit = 100
	var d *guardd
	confinement{Exe: n.exe, NoFile: limit}.on(t, n, func() { d = n.launch("a", "listen: []") })
	defer d.stop()
	d.awaitReady()
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Fatal(err)
	}
	before := d.footprint()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	query := pipeline(t, cachedName, dns.TypeA, 1)
	for range 3 * limit { // each always has a connection open, and asks on it
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := dialFrom(ctx, hoarder, from(), clusterIP4)
				if err != nil {
					continue
				}
				for ctx.Err() == nil {
					if _, err := c.Write(query); err != nil {
						break
					}
					buf := make([]byte, 512)
					_ = c.SetReadDeadline(time.Now().Add(time.Second))
					if _, err := c.Read(buf); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
						break
					}
					select {
					case <-ctx.Done():
					case <-time.After(200 * time.Millisecond):
					}
				}
				c.Close()
			}
		})
	}
	most := 0
	await(t, "the process to be out of descriptors", func() bool {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.proc.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, len(fds))
		return most >= limit-1
	})
	hot := n.hotLoad(n.pod, false, 200, 3*time.Second)
	if lost := drive(t, []*stream{hot})(); lost > 0 {
		t.Errorf("%d of what is known were lost over UDP", lost)
	}
	stop()
	wg.Wait()
	took := await(t, "TCP to be answered", func() bool {
		return n.taken(n.pod, clusterIP4) && n.ask(n.pod.Namespace, "tcp", clusterIP4, cachedName) == nil
	})
	t.Logf("%d descriptors at most; TCP answered %v after the crowd had gone", most, took)
	d.awaitReady()
	d.settles(t, before)
}

// TestNodeStarved: the process can open no socket at all, so what it does not know
// it cannot ask. Its SERVFAILs leave the sockets like answers; the node's DNS goes
// on by kube-proxy's path all the same, until there are descriptors again.
func TestNodeStarved(t *testing.T) {
	n := newNode(t)
	d := n.launch("a", "listen: []")
	defer d.stop()
	d.awaitReady()
	if !n.taken(n.pod, clusterIP4) {
		t.Fatal("queries are not taken")
	}
	var usual unix.Rlimit
	if err := unix.Prlimit(d.proc.Pid(), unix.RLIMIT_NOFILE, nil, &usual); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(d.proc.Pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: usual.Max}, nil); err != nil {
		t.Fatal(err)
	}
	name := 0
	unknown := func() error {
		name++
		return n.ask(n.pod.Namespace, "udp", clusterIP4, fmt.Sprintf("%d.uncached.example.com.", name))
	}
	left := await(t, "what is not known to be answered by kube-proxy's path", func() bool {
		return unknown() == nil && !n.taken(n.pod, clusterIP4)
	})
	for range 20 {
		if err := unknown(); err != nil {
			t.Errorf("on kube-proxy's path: %v", err)
		}
	}
	if err := unix.Prlimit(d.proc.Pid(), unix.RLIMIT_NOFILE, &usual, nil); err != nil {
		t.Fatal(err)
	}
	back := await(t, "queries to be taken again", func() bool { return n.taken(n.pod, clusterIP4) && unknown() == nil })
	t.Logf("left to kube-proxy after %v, taken again %v after there were descriptors", left, back)
	d.awaitReady()
}

// TestNodePortTaken: somebody has port 53 of all addresses. The daemon says who is
// in the way and what to do, and DNS goes on without it.
func TestNodePortTaken(t *testing.T) {
	n := newNode(t)
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network, func(t *testing.T) {
			var holder interface{ Close() error }
			var err error
			if network == "udp" {
				var c net.PacketConn
				c, err = n.Node.ListenPacket(t.Context(), "udp4", "0.0.0.0:53")
				holder = c
			} else {
				var l net.Listener
				l, err = n.Node.Listen(t.Context(), "tcp4", "0.0.0.0:53")
				holder = l
			}
			if err != nil {
				t.Fatal(err)
			}
			defer holder.Close()
			d := n.launch("a")
			select {
			case <-d.proc.Done():
				if d.proc.Err() == nil {
					t.Error("ended as if all were well")
				}
			case <-time.After(eventually):
				d.kill()
				t.Error("does not end")
			}
			if line := d.logged("another process"); line == "" || !strings.Contains(line, "53") {
				t.Errorf("it does not say what is wrong:\n%s", d.log)
			}
			for _, overTCP := range []string{"udp", "tcp"} {
				if err := n.ask(n.pod.Namespace, overTCP, clusterIP4, cachedName); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// nodeSoak is how long TestNodeSoak lasts; hours, before a release:
//
//	go test ./cmd/dnsguard -run NodeSoak -v -timeout 25h -node.soak 24h
var nodeSoak = flag.Duration("node.soak", 12*time.Second, "the length of TestNodeSoak")

// TestNodeSoak: all kinds of load, with reloads and deaths of upstreams all the
// time. Nothing is lost, and the daemon holds no more in the end than at first.
func TestNodeSoak(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	n.exe = built(t)
	d := n.start("a", "listen: []", "log: {level: warn, format: text}")
	defer d.stop()
	load := func(name string, tcp bool, rate, sockets int, qtype uint16, unique bool, length time.Duration, names ...string) *stream {
		return &stream{name: name, ns: n.pod.Namespace, load: lab.Load{
			Server: clusterIP4, TCP: tcp, Rate: rate, Queries: max(1, int(float64(rate)*length.Seconds())), Sockets: sockets,
			Names: names, Type: qtype, Unique: unique, Timeout: answerTime,
		}}
	}
	mixed := func(length time.Duration) []*stream {
		return []*stream{
			load("hits", false, 400, 8, dns.TypeA, false, length, cachedName, "example.com.", "api.example.com.", "kubernetes.default.svc.cluster.local."),
			load("new ports", false, 100, 0, dns.TypeA, false, length, cachedName),
			load("misses", false, 100, 4, dns.TypeA, true, length, "uncached.example.com.", "uncached.svc.cluster.local."),
			load("walks", false, 50, 4, dns.TypeA, false, length, "www.example.com.default.svc.cluster.local.", "api.example.com.default.svc.cluster.local.", "soon.example.com.default.svc.cluster.local."),
			load("tcp", true, 50, 0, dns.TypeA, false, length, cachedName),
			load("large", true, 20, 2, dns.TypeTXT, false, length, "text.example.com."),
			load("short", false, 50, 4, dns.TypeA, false, length, "soon.example.com."),
		}
	}
	disturb := func(ctx context.Context) (rounds int) {
		for ; ; rounds++ {
			dead := n.dns[rounds%2].Server
			steps := []func(){
				func() { _ = dead.SetFaults(lab.Faults{Silent: true}) },
				func() {
					d.reconfigure("listen: []", "log: {level: warn, format: text}", fmt.Sprintf("cache: {size: %dMi}", 16+rounds%2))
				},
				func() { _ = dead.SetFaults(lab.Faults{}) },
				func() { n.tell(func(c *cluster) { c.leave(n.dns[rounds%2]) }) },
				func() { n.tell(func(c *cluster) { c.serve(n.dns[rounds%2], "") }) },
				func() {
					d.reconfigure("listen: []", "log: {level: warn, format: text}", fmt.Sprintf("cache: {size: %dMi}", 24+rounds%2))
				},
			}
			for _, step := range steps {
				step()
				select {
				case <-ctx.Done():
					_ = dead.SetFaults(lab.Faults{})
					return rounds
				case <-time.After(400 * time.Millisecond):
				}
			}
		}
	}
	drive(t, mixed(2*time.Second))() // what is made once, and kept
	before := d.footprint()
	streams := mixed(*nodeSoak)
	ctx, stop := context.WithTimeout(t.Context(), *nodeSoak)
	defer stop()
	wait := drive(t, streams)
	rounds := disturb(ctx)
	wait()
	for _, s := range streams {
		// With one of two upstreams silent, what is asked of it first is asked
		// again; a question in a thousand may meet it twice.
		if lost := s.result.Lost + s.result.Wrong; lost > 0 {
			t.Errorf("%s: %d without a right answer", s.name, lost)
		}
		if failed := s.result.Failed(); failed > s.result.Sent/20+1 {
			t.Errorf("%s: %d of %d failed", s.name, failed, s.result.Sent)
		}
	}
	t.Logf("%d rounds of a death, two reloads and two pieces of news; %v reloads", rounds, d.metric("dnsguard_config_reloads_total", `result="success"`))
	if rounds == 0 {
		t.Error("nothing was disturbed")
	}
	d.settles(t, before)
	if line := d.logged("level=ERROR"); line != "" {
		t.Error(line)
	}
}

// TestNodeSlowUpstreams: both upstreams take half a second for each answer. All is
// answered, and they are not asked more than a tenth above what clients ask.
func TestNodeSlowUpstreams(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	d := n.start("a")
	defer d.stop()
	for _, pod := range n.dns {
		if err := pod.Server.SetFaults(lab.Faults{Delay: 500 * time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	total := func() (sum int) {
		for _, pod := range n.dns {
			udp, tcp := pod.Server.Total()
			sum += udp + tcp
		}
		return sum
	}
	before := total()
	load := &stream{name: "misses", ns: n.pod.Namespace, load: lab.Load{
		Server: clusterIP4, Rate: 300, Queries: 1500, Sockets: 4, Names: []string{"uncached.example.com."}, Unique: true, Timeout: answerTime,
	}}
	if lost := drive(t, []*stream{load})(); lost > 0 {
		t.Errorf("%d of 1500 questions failed", lost)
	}
	// A good time before has saved up to 50 for hedges; probes come on top.
	asked := total() - before
	t.Logf("asked %d times for 1500 questions; %v hedges, %v retries", asked, d.metric("dnsguard_upstream_hedges_total"), d.metric("dnsguard_upstream_retries_total"))
	if asked > 1500*11/10+60 {
		t.Errorf("asked %d times for 1500 questions", asked)
	}
}

// TestNodeClusterDomain: a cluster domain that the cluster's DNS denies is a warning and
// one line of the log, and gone when it is mended. Nothing is unready for it.
func TestNodeClusterDomain(t *testing.T) {
	n := newNode(t)
	d := n.start("a", "clusterDomain: wrong.internal")
	defer d.stop()
	const wrong = "warning: clusterDomain: its DNS says REFUSED to the SOA of wrong.internal: "
	d.awaitReady()
	if page := d.page("/readyz"); !strings.HasPrefix(page, "ok\n") || !strings.Contains(page, wrong) {
		t.Errorf("/readyz says %q", page)
	}
	if got := strings.Count(d.log.String(), "clusterDomain may be wrong"); got != 1 {
		t.Errorf("%d lines in the log", got)
	}
	d.reconfigure()
	await(t, "the right domain to be seen", func() bool {
		page := d.page("/readyz")
		return strings.HasPrefix(page, "ok") && !strings.Contains(page, "clusterDomain")
	})
	d.reconfigure("clusterDomain: other.internal")
	await(t, "another wrong one to be seen", func() bool {
		page := d.page("/readyz")
		return strings.HasPrefix(page, "ok") && strings.Contains(page, "the SOA of other.internal")
	})
}

// TestNodeLocalLeftovers: NOTRACK rules of a NodeLocal DNSCache that was killed keep
// kube-proxy's DNAT from the ClusterIP. The reason not to be ready names them, and no
// others; without them the daemon gets ready by itself.
func TestNodeLocalLeftovers(t *testing.T) {
	n := newNode(t)
	rules := func(op, comment string) {
		untrack := func(program, addr string) {
			for _, proto := range []string{"udp", "tcp"} {
				n.run(program, "-w", "-t", "raw", op, "OUTPUT", "-d", addr, "-p", proto, "--dport", "53",
					"-m", "comment", "--comment", comment, "-j", "NOTRACK")
			}
		}
		untrack("iptables-nft", clusterIP4.Addr().String())
		if n.IPv6 {
			untrack("ip6tables-nft", clusterIP6.Addr().String())
		}
	}
	const theirs, others = "NodeLocal DNS Cache: skip conntrack", "somebody's"
	rules("-A", others)
	d := n.launch("a")
	defer d.stop()
	reason := func() string {
		for line := range strings.Lines(d.page("/readyz")) {
			if strings.HasPrefix(line, "upstream: none has answered yet: ") {
				return line
			}
		}
		return ""
	}
	const hint = "NOTRACK rules of a NodeLocal DNSCache for "
	await(t, "no answer", func() bool { return reason() != "" })
	if text := reason(); strings.Contains(text, hint) {
		t.Errorf("rules of others: %q", text)
	}
	rules("-A", theirs)
	rules("-D", others)
	want := hint + clusterIP4.Addr().String()
	if n.IPv6 {
		want += ", " + clusterIP6.Addr().String()
	}
	await(t, want, func() bool { return strings.Contains(reason(), want) })
	rules("-D", theirs)
	d.awaitReady()
}

// TestDomainProblem: what denies the domain is told from what denies nothing.
func TestDomainProblem(t *testing.T) {
	for rcode, want := range map[int]string{
		dns.RcodeSuccess: "", dns.RcodeServerFailure: "", dns.RcodeNotImplemented: "",
		dns.RcodeNameError: "NXDOMAIN to the SOA of k8s.example", dns.RcodeRefused: "REFUSED to the SOA of k8s.example",
	} {
		if got := domainProblem("k8s.example", uint16(rcode)); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("rcode %d: %q", rcode, got)
		}
	}
}

// TestNodeBrokenConfiguration: a daemon with a broken configuration says what is
// wrong and ends, and queries stay on kube-proxy's path; one that gets it later
// goes on with the old one and says so.
func TestNodeBrokenConfiguration(t *testing.T) {
	n := newNode(t)
	const broken = "cache: {size: many}"
	d := n.launch("a", broken)
	select {
	case <-d.proc.Done():
		if d.proc.Err() == nil {
			t.Error("ended as if all were well")
		}
	case <-time.After(eventually):
		d.kill()
		t.Error("does not end")
	}
	if d.logged("cache.size", "many") == "" {
		t.Errorf("it does not say what is wrong:\n%s", d.log)
	}
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Error(err)
	}
	if left := n.leftovers(); left != nil {
		t.Errorf("left: %v", left)
	}

	d = n.start("a")
	defer d.stop()
	good, err := os.ReadFile(d.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.config, append(bytes.Clone(good), broken...), 0o600); err != nil {
		t.Fatal(err)
	}
	await(t, "a reason not to be ready", func() bool { return strings.Contains(d.page("/readyz"), "configuration was refused") })
	if !n.taken(n.pod, clusterIP4) {
		t.Error("queries are not taken any more")
	}
	if err := os.WriteFile(d.config, good, 0o600); err != nil {
		t.Fatal(err)
	}
	d.signal(syscall.SIGHUP)
	d.awaitReady()
}
