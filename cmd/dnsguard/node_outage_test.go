package main

import (
	"flag"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

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

// stream is one kind of client.
type stream struct {
	name   string
	ns     *lab.Namespace
	load   lab.Load
	result *lab.LoadResult
}

// streams are the kinds of clients: each path, transport, family and kind of
// port, with udp and tcp queries a second in all, for the given time.
func (n *node) streams(udp, tcp int, length time.Duration) []*stream {
	pod, host := n.pod.Namespace, n.Node.Namespace
	make1 := func(name string, ns *lab.Namespace, server netip.AddrPort, rate int, overTCP bool, sockets int) *stream {
		return &stream{name: name, ns: ns, load: lab.Load{
			Server: server, TCP: overTCP, Rate: rate, Queries: int(float64(rate) * length.Seconds()),
			Sockets: sockets, Names: []string{cachedName}, Timeout: time.Second,
		}}
	}
	out := []*stream{
		make1("udp, fixed ports", pod, clusterIP4, udp*2/5, false, 4),
		make1("udp, new ports", pod, clusterIP4, udp/5, false, 0),
		make1("udp, link-local", pod, linkLocal4, udp/5, false, 4),
		make1("udp, node's own", host, clusterIP4, udp/10, false, 4),
		make1("tcp, new connections", pod, clusterIP4, tcp*3/5, true, 0),
		make1("tcp, link-local", pod, linkLocal4, tcp*2/5, true, 0),
	}
	if n.IPv6 {
		out = append(out, make1("udp, IPv6", pod, clusterIP6, udp/10, false, 4))
	}
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

// outageRates are moderate: two cores carry them with other tests beside.
const outageUDP, outageTCP = 1200, 300

// TestNodeKill kills the daemon under load, and starts another one: what is
// lost was in the dead one's hands, and kube-proxy serves meanwhile.
func TestNodeKill(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	d := n.start("a")
	before := n.asked()
	start := time.Now()
	wait := drive(t, n.streams(outageUDP, outageTCP, 4*time.Second))
	after(start, time.Second)
	if got := n.asked() - before; got > 20 {
		t.Errorf("DNS pods were asked %d times while the daemon was there", got)
	}
	d.kill()
	after(start, 2*time.Second)
	if got := n.asked() - before; got < (outageUDP+outageTCP)/4 {
		t.Errorf("DNS pods were asked %d times: kube-proxy does not serve", got)
	}
	d = n.start("a")
	defer d.stop()
	t.Logf("ready again %v after the start", time.Since(start.Add(2*time.Second)))
	// Those in the dead process's queues and hands: the milliseconds that the
	// kernel takes to end a process, more where it waits for a CPU.
	if lost := wait(); lost > (outageUDP+outageTCP)/20 {
		t.Errorf("%d queries lost", lost)
	}
	if d.metric("dnsguard_queries_total") < 100 {
		t.Error("the second daemon did not take over")
	}
}

// TestNodeHang stops the daemon under load: when aliveTimeout is over, kube-proxy
// serves, until the daemon goes on.
func TestNodeHang(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	d := n.start("a")
	defer d.stop()
	start := time.Now()
	streams := n.streams(outageUDP, outageTCP, 5*time.Second)
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
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Error(err)
	}
	if got := n.asked() - before; got != 0 {
		t.Error("the daemon does not take queries again")
	}
	if d.metric("dnsguard_intercept_withdrawals_total", `reason="silent"`) == 0 {
		t.Error("the withdrawal is not counted")
	}
}

// TestNodeTerminate ends the daemon in order under load: nothing is lost.
func TestNodeTerminate(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	d := n.start("a")
	start := time.Now()
	wait := drive(t, n.streams(outageUDP, outageTCP, 3*time.Second))
	after(start, time.Second)
	d.stop()
	t.Logf("gone %v after SIGTERM", time.Since(start.Add(time.Second)))
	if lost := wait(); lost > 0 {
		t.Errorf("%d queries lost", lost)
	}
	if err := n.ask(n.pod.Namespace, "udp", linkLocal4, cachedName); err != nil {
		t.Errorf("the fallback of the link-local address: %v", err)
	}
}

// TestNodeUpgrade starts a second daemon, and ends the first when it is ready:
// nothing is lost, also when the first one has stood still for a moment.
func TestNodeUpgrade(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, stall := range []time.Duration{0, 100 * time.Millisecond} {
		t.Run(fmt.Sprintf("stalled %v", stall), func(t *testing.T) {
			n := newNode(t)
			// One pod stands for many: its connections are not to be shed where
			// the machine is slow to serve them.
			limits := "limits: {tcpConnections: 10000, tcpConnectionsPerClient: 10000}"
			old := n.start("old", limits)
			start := time.Now()
			wait := drive(t, n.streams(*nodeUDP, *nodeTCP, 5*time.Second))
			after(start, 500*time.Millisecond)
			young := n.start("young", limits)
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
			if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
				t.Error(err)
			}
			if n.asked() != before {
				t.Error("the newcomer does not serve")
			}
		})
	}
}
