package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// Rates of TestNodeUpgrade, for a machine that has nothing else to do:
//
//	go test ./cmd/dnsguard -run NodeUpgrade -v -node.udp 10000 -node.tcp 1000
var (
	nodeUDP = flag.Int("node.udp", 1500, "UDP queries a second in TestNodeUpgrade")
	nodeTCP = flag.Int("node.tcp", 300, "TCP connections a second in TestNodeUpgrade")
)

// nodeVariant is a way to intercept, with what it takes.
type nodeVariant struct {
	name      string
	intercept string
	clusterIP bool          // queries to the ClusterIP are taken
	linkLocal bool          // those to link-local addresses are, and outlive the daemon
	host      bool          // those of clients on the node are
	timeout   time.Duration // of clients; zero: a second
}

func nodeVariants() []nodeVariant {
	return []nodeVariant{
		{name: "cluster-ip", intercept: "intercept: {mode: cluster-ip}", clusterIP: true, linkLocal: true, host: true},
		{name: "link-local alone", intercept: "intercept: {mode: link-local}", linkLocal: true, host: true},
		// What the iptables backend cannot do: see docs/OPERATIONS.md.
		{name: "cluster-ip by iptables", intercept: "intercept: {mode: cluster-ip, backend: iptables}", clusterIP: true},
	}
}

// busiest is the address that most of a variant's clients ask.
func (v nodeVariant) busiest() netip.AddrPort {
	if v.clusterIP {
		return clusterIP4
	}
	return linkLocal4
}

// servers are the addresses whose queries from pods it takes.
func (v nodeVariant) servers(n *node) (out []netip.AddrPort) {
	for _, a := range n.servers() {
		isClusterIP := a == clusterIP4 || a == clusterIP6
		if isClusterIP && v.clusterIP || !isClusterIP && v.linkLocal {
			out = append(out, a)
		}
	}
	return out
}

// start starts a daemon that intercepts so.
func (v nodeVariant) start(n *node, name string, more ...string) *guardd {
	d := v.launch(n, name, more...)
	d.awaitReady()
	return d
}

// launch does not wait until it is ready.
func (v nodeVariant) launch(n *node, name string, more ...string) *guardd {
	return n.launch(name, append([]string{v.intercept}, more...)...)
}

// stream is one kind of client.
type stream struct {
	name   string
	ns     *lab.Namespace
	load   lab.Load
	result *lab.LoadResult
}

// streams are the kinds of clients that a variant takes: each path, transport,
// family and kind of port, with about udp and tcp queries a second in all, for
// the given time.
func (n *node) streams(v nodeVariant, udp, tcp int, length time.Duration) (out []*stream) {
	var overUDP, overTCP []*stream
	add := func(name string, server netip.AddrPort, host, overTCPs bool, sockets int) {
		toClusterIP := server == clusterIP4 || server == clusterIP6
		switch {
		case toClusterIP && !v.clusterIP, !toClusterIP && !v.linkLocal, host && !v.host, server.Addr().Is6() && !n.IPv6:
			return
		}
		s := &stream{name: name, ns: n.pod.Namespace, load: lab.Load{
			Server: server, TCP: overTCPs, Sockets: sockets, Names: []string{cachedName}, Timeout: max(v.timeout, time.Second),
		}}
		if host {
			s.ns = n.Node.Namespace
		}
		if overTCPs {
			overTCP = append(overTCP, s)
		} else {
			overUDP = append(overUDP, s)
		}
	}
	add("udp, fixed ports", clusterIP4, false, false, 4)
	add("udp, new ports", clusterIP4, false, false, 0)
	add("udp, IPv6", clusterIP6, false, false, 4)
	add("udp, node's own", clusterIP4, true, false, 4)
	add("udp, link-local", linkLocal4, false, false, 4)
	add("tcp", clusterIP4, false, true, 0)
	add("tcp, link-local", linkLocal4, false, true, 0)
	if !v.clusterIP {
		add("udp, link-local, new ports", linkLocal4, false, false, 0)
		add("udp, link-local, IPv6", linkLocal6, false, false, 4)
		add("udp, link-local, node's own", linkLocal4, true, false, 4)
	}
	if !v.clusterIP || !v.linkLocal {
		add("tcp, IPv6", clusterIP6, false, true, 0)
		add("tcp, link-local, IPv6", linkLocal6, false, true, 0)
	}
	share := func(list []*stream, rate int) {
		for _, s := range list {
			s.load.Rate = rate / len(list)
			s.load.Queries = int(float64(s.load.Rate) * length.Seconds())
		}
		out = append(out, list...)
	}
	share(overUDP, udp)
	share(overTCP, tcp)
	return out
}

// drive runs all streams; the returned function waits for their end, logs what
// became of them and returns how many queries failed.
func drive(t *testing.T, streams []*stream) (wait func() (lost int)) {
	t.Helper()
	var wg sync.WaitGroup
	for _, s := range streams {
		wg.Go(func() {
			r, err := s.load.Run(t.Context(), s.ns)
			if err != nil {
				t.Errorf("%s: %v", s.name, err)
			}
			s.result = r
		})
	}
	return func() int {
		wg.Wait()
		sent, lost := 0, 0
		for _, s := range streams {
			t.Logf("%-22s %v", s.name, s.result)
			sent, lost = sent+s.result.Sent, lost+s.result.Failed()
		}
		t.Logf("lost %d of %d", lost, sent)
		return lost
	}
}

// after waits until a moment of a schedule.
func after(start time.Time, d time.Duration) { <-time.After(time.Until(start.Add(d))) }

// patient gives clients and the dead-man's switch the time that a busy machine
// takes: where nothing is to be lost, what is late is not lost, and who stands
// still for want of a CPU does not hang.
func (v nodeVariant) patient() nodeVariant {
	v.timeout = 5 * time.Second
	v.intercept = strings.TrimSuffix(v.intercept, "}") + ", aliveTimeout: 3s}"
	return v
}

// outageRates are moderate: two cores carry them with other tests beside.
const outageUDP, outageTCP = 1200, 300

// TestNodeKill kills the daemon under load, and starts another one: what is
// lost was in the dead one's hands, and kube-proxy serves meanwhile.
func TestNodeKill(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, v := range nodeVariants() {
		t.Run(v.name, func(t *testing.T) {
			n := newNode(t)
			d := v.start(n, "a")
			before := n.asked()
			start := time.Now()
			wait := drive(t, n.streams(v, outageUDP, outageTCP, 4*time.Second))
			after(start, time.Second)
			if got := n.asked() - before; got > 20 {
				t.Errorf("DNS pods were asked %d times while the daemon was there", got)
			}
			d.kill()
			after(start, 2*time.Second)
			if got := n.asked() - before; got < (outageUDP+outageTCP)/4 {
				t.Errorf("DNS pods were asked %d times: kube-proxy does not serve", got)
			}
			d = v.start(n, "a")
			defer d.stop()
			t.Logf("ready again %v after the start", time.Since(start.Add(2*time.Second)))
			// Those in the dead process's queues and hands: the milliseconds that the
			// kernel takes to end a process, more where it waits for a CPU.
			if lost := wait(); lost > (outageUDP+outageTCP)/20 {
				t.Errorf("%d queries lost", lost)
			}
			if !n.taken(n.pod, v.busiest()) {
				t.Error("the second daemon did not take over")
			}
		})
	}
}

// TestNodeHang stops the daemon under load: when aliveTimeout is over, kube-proxy
// serves, until the daemon goes on.
func TestNodeHang(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, v := range nodeVariants() {
		t.Run(v.name, func(t *testing.T) {
			n := newNode(t)
			d := v.start(n, "a")
			defer d.stop()
			start := time.Now()
			streams := n.streams(v, outageUDP, outageTCP, 5*time.Second)
			wait := drive(t, streams)
			after(start, time.Second)
			d.signal(syscall.SIGSTOP)
			after(start, 2500*time.Millisecond)
			before := n.asked()
			after(start, 3*time.Second)
			if got := n.asked() - before; got < (outageUDP+outageTCP)/4 {
				t.Errorf("DNS pods were asked %d times while the daemon hung: kube-proxy does not serve", got)
			}
			d.signal(syscall.SIGCONT)
			wait()
			for _, s := range streams {
				from, length := s.result.LongestOutage()
				t.Logf("%-22s no answer for %v from %v", s.name, length, from)
				if length > 1300*time.Millisecond { // aliveTimeout, and a busy machine
					t.Errorf("%s: no answer for %v", s.name, length)
				}
			}
			d.awaitReady()
			before = n.asked()
			if err := n.ask(n.pod.Namespace, "udp", v.busiest(), cachedName); err != nil {
				t.Error(err)
			}
			if got := n.asked() - before; got != 0 {
				t.Error("the daemon does not take queries again")
			}
			if d.metric("dnsguard_intercept_withdrawals_total", `reason="silent"`) == 0 {
				t.Error("the withdrawal is not counted")
			}
		})
	}
}

// TestNodeTerminate ends the daemon in order under load, and starts it again:
// nothing is lost, but for TCP connections that are under way when it starts.
func TestNodeTerminate(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, v := range nodeVariants() {
		v := v.patient()
		t.Run(v.name, func(t *testing.T) {
			n := newNode(t)
			d := v.start(n, "a")
			start := time.Now()
			streams := n.streams(v, outageUDP, outageTCP, 4*time.Second)
			wait := drive(t, streams)
			after(start, time.Second)
			d.stop()
			t.Logf("gone %v after SIGTERM", time.Since(start.Add(time.Second)))
			if v.linkLocal {
				if err := n.ask(n.pod.Namespace, "udp", linkLocal4, cachedName); err != nil {
					t.Errorf("the fallback of the link-local address: %v", err)
				}
			}
			after(start, 2*time.Second)
			d = v.start(n, "a")
			defer d.stop()
			lost, resets := wait(), 0
			for _, s := range streams {
				if s.load.TCP {
					resets += s.result.Refused
				}
			}
			// Connections that kube-proxy had led to a DNS pod, under way in the very
			// moment when the second daemon takes their next segment: its kernel does
			// not know them, and resets them. Some 0.2 of 300 a second.
			if lost > resets || resets > 5 {
				t.Errorf("%d queries lost, of them %d connections reset", lost, resets)
			}
			if !n.taken(n.pod, v.busiest()) {
				t.Error("the second daemon did not take over")
			}
		})
	}
}

// TestNodeUpgrade starts a second daemon, and ends the first when it is ready:
// nothing is lost, also when the first one has stood still for a moment.
func TestNodeUpgrade(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, v := range nodeVariants() {
		v := v.patient()
		for _, stall := range []time.Duration{0, 100 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s, stalled %v", v.name, stall), func(t *testing.T) {
				n := newNode(t)
				// One pod stands for many: its connections are not to be shed where
				// the machine is slow to serve them.
				limits := "limits: {tcpConnections: 10000, tcpConnectionsPerClient: 10000}"
				old := v.start(n, "old", limits)
				start := time.Now()
				wait := drive(t, n.streams(v, *nodeUDP, *nodeTCP, 5*time.Second))
				after(start, 500*time.Millisecond)
				young := v.start(n, "young", limits)
				defer young.stop()
				t.Logf("ready %v after the start", time.Since(start.Add(500*time.Millisecond)))
				if stall > 0 {
					old.signal(syscall.SIGSTOP)
				}
				old.signal(syscall.SIGTERM)
				if stall > 0 {
					<-time.After(stall)
					old.signal(syscall.SIGCONT)
				}
				old.exited()
				t.Logf("old one gone %v after the start", time.Since(start))
				if lost := wait(); lost > 0 {
					t.Errorf("%d queries lost", lost)
				}
				if n := young.metric("dnsguard_shed_total"); n > 0 {
					t.Errorf("%v queries or connections were shed", n)
				}
				if n := young.metric("dnsguard_intercept_repairs_total"); n > 0 {
					t.Errorf("the newcomer had to repair %v times", n)
				}
				before := n.asked()
				if err := n.ask(n.pod.Namespace, "udp", v.busiest(), cachedName); err != nil {
					t.Error(err)
				}
				if n.asked() != before {
					t.Error("the newcomer does not serve")
				}
			})
		}
	}
}

// TestNodeUpgradeToMute starts a second daemon that no upstream answers, beside
// one that works: it takes nothing from it. When the first one goes, kube-proxy
// serves.
func TestNodeUpgradeToMute(t *testing.T) {
	for _, v := range nodeVariants() {
		v := v.patient()
		t.Run(v.name, func(t *testing.T) {
			n := newNode(t)
			old := v.start(n, "old")
			young := v.launch(n, "young", `upstreams: [{zones: ["."], servers: [192.0.2.1]}]`)
			defer young.stop()
			await(t, "a reason not to be ready", func() bool {
				return strings.Contains(young.page("/readyz"), "no upstream has answered us")
			})
			streams := n.streams(v, 300, 60, time.Second)
			if lost := drive(t, streams)(); lost > 0 {
				t.Errorf("%d queries lost beside the newcomer", lost)
			}
			for _, server := range v.servers(n) {
				if !n.taken(n.pod, server) {
					t.Errorf("queries to %v are not taken", server)
				}
			}
			old.stop()
			before := n.asked()
			for range 5 {
				if err := n.ask(n.pod.Namespace, "udp", v.busiest(), cachedName); err != nil {
					t.Errorf("after the first one has gone: %v", err)
				}
			}
			if n.asked()-before < 5 {
				t.Error("kube-proxy does not serve after the first one has gone")
			}
			young.awaitLog("intercepting")
			if page := young.page("/readyz"); !strings.Contains(page, "none has answered yet") {
				t.Errorf("/readyz: %s", page)
			}
			if young.logged("taking queries") != "" {
				t.Error("the newcomer takes queries")
			}
		})
	}
}

// TestNodeUpgradeNumbers starts a second daemon with other numbers, and ends the
// first: nothing is lost, names that nobody has cached get answers all the time,
// and nothing of the first one's stays.
func TestNodeUpgradeNumbers(t *testing.T) {
	for name, tt := range map[string]struct {
		key   string
		waits bool // for the first one's end
	}{
		"mark":         {"mark: 0x300", true},
		"one bit":      {"mark: 0x50", true}, // that of our own queries
		"table":        {"table: 5400", false},
		"rulePriority": {"rulePriority: 7", false},
	} {
		t.Run(name, func(t *testing.T) {
			v := nodeVariants()[0].patient()
			n := newNode(t)
			old := v.start(n, "old")
			v.intercept = strings.TrimSuffix(v.intercept, "}") + ", " + tt.key + "}"
			young := v.launch(n, "young")
			defer young.stop()
			if tt.waits {
				await(t, "a reason not to be ready", func() bool {
					return strings.Contains(young.page("/readyz"), "another intercept.mark")
				})
			} else {
				young.awaitReady()
			}
			streams := n.streams(v, 300, 60, time.Second)
			wait := drive(t, streams)
			for i := range 3 {
				// No such name, which the cache does not know before.
				reply, err := lab.Ask(t.Context(), n.pod.Namespace, "udp", clusterIP4, fmt.Sprintf("no%d.example.com.", i), dns.TypeA)
				if err != nil || reply.Rcode != dns.RcodeNameError {
					t.Errorf("what is not cached: %v, %v", reply, err)
				}
			}
			if lost := wait(); lost > 0 {
				t.Errorf("%d queries lost while both were there", lost)
			}
			old.stop()
			young.awaitReady()
			if !n.taken(n.pod, v.busiest()) {
				t.Error("queries are not taken")
			}
			await(t, "the first one's rules and routes to go", func() bool {
				rules := strings.Count(n.run("ip", "rule"), "proto 153")
				routes := n.run("ip", "-4", "route", "show", "table", "all", "proto", "153") +
					n.run("ip", "-6", "route", "show", "table", "all", "proto", "153")
				return rules == 1 && strings.Count(routes, "local ") == len(n.servers())
			})
		})
	}
}

// TestNodeNewcomerDies: a newcomer gets queries, and is killed before it answers
// them. Who asked them is not taken for somebody who cannot reach the first one.
func TestNodeNewcomerDies(t *testing.T) {
	n := newNode(t)
	v := nodeVariants()[0].patient()
	old := v.start(n, "old")
	defer old.stop()
	for _, moment := range []string{"serving", "intercepting"} {
		if !n.taken(n.pod, clusterIP4) { // it is known from now on
			t.Fatal("queries are not taken")
		}
		young := v.launch(n, "young")
		young.awaitLog(moment, map[bool]string{true: clusterIP4.String()}[moment == "serving"])
		young.signal(syscall.SIGSTOP)
		unanswered := 0
		for i := 0; i < 40 && unanswered < 2; i++ { // the kernel gives it every other one
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			if _, err := lab.Ask(ctx, n.pod.Namespace, "udp", clusterIP4, cachedName, dns.TypeA); err != nil {
				unanswered++
			}
			cancel()
		}
		if unanswered == 0 {
			t.Errorf("%s: the newcomer got no query, and this proves nothing", moment)
		}
		young.kill()
		<-time.After(4 * time.Second) // nobody asks meanwhile
		if line := old.logged("client does not reach us"); line != "" {
			t.Errorf("%s: %s", moment, line)
		}
		if got := old.metric("dnsguard_intercept_bypassed_clients"); got != 0 {
			t.Errorf("%s: %v clients are let past", moment, got)
		}
	}
}

// TestNodeFallbackStays: the fallback of a predecessor knows the ClusterIPs of
// both families, a daemon that has not heard the cluster that of one. It leaves
// the fallback as it is.
func TestNodeFallbackStays(t *testing.T) {
	n := newNode(t)
	if !n.IPv6 {
		labtest.Missing(t, errors.New("no IPv6"))
	}
	v := nodeVariants()[1]
	v.start(n, "a").stop()
	before := nft(t, n.Node.Namespace, "", "list", "table", "inet", "dnsguard-fallback")
	// No upstream answers, so that it does not take the queries itself.
	d := v.launch(n, "deaf", `upstreams: [{zones: ["."], servers: [192.0.2.1]}]`,
		"kubernetes: {source: file, file: /nonexistent/cluster.yaml, nodeName: node1}")
	d.awaitLog("intercepting")
	if diff := cmp.Diff(before, nft(t, n.Node.Namespace, "", "list", "table", "inet", "dnsguard-fallback")); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	for _, server := range []netip.AddrPort{linkLocal4, linkLocal6} {
		if err := n.ask(n.pod.Namespace, "udp", server, cachedName); err != nil {
			t.Errorf("%v: %v", server, err)
		}
	}
	d.kill()
}
