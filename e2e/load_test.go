package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// stream is one kind of client.
type stream struct {
	name   string
	ns     *lab.Namespace
	load   lab.Load
	result *lab.LoadResult
}

// Rates are moderate: two cores carry them, the cluster and CoreDNS too, which
// answers all of it while dnsguard does not.
const (
	udpRate = 500
	tcpRate = 100
)

// uncached exists outside of the cluster below any label, with TTL 0: each
// question goes all the way.
const uncached = "uncached.example.com."

// patience is how long a client waits for an answer: libc's is 5 s.
const patience = 3 * time.Second

// streams are clients of each path, transport, family and kind of port, for the
// given time; what they ask can be cached.
func (w *world) streams(length, patience time.Duration) []*stream {
	make1 := func(name string, ns *lab.Namespace, server netip.AddrPort, rate int, tcp bool, sockets int) *stream {
		return &stream{name: name, ns: ns, load: lab.Load{
			Server: server, TCP: tcp, Rate: rate, Queries: int(float64(rate) * length.Seconds()),
			Sockets: sockets, Names: []string{apiName}, Timeout: patience,
		}}
	}
	pod, host := w.client.Namespace, w.nodes[0].Namespace
	return []*stream{
		make1("udp, fixed ports", pod, kubelab.DNS4, udpRate*5/10, false, 4),
		make1("udp, new ports", pod, kubelab.DNS4, udpRate*2/10, false, 0),
		make1("udp, IPv6", pod, kubelab.DNS6, udpRate*2/10, false, 4),
		make1("udp, node's own", host, kubelab.DNS4, udpRate*1/10, false, 4),
		make1("tcp, new connections", pod, kubelab.DNS4, tcpRate, true, 0),
	}
}

// misses are clients in a pod whose every question goes all the way to CoreDNS and on.
func (w *world) misses(pod *kubelab.Pod, length time.Duration) []*stream {
	const rate = 100
	make1 := func(name string, sockets int) *stream {
		return &stream{name: name, ns: pod.Namespace, load: lab.Load{
			Server: kubelab.DNS4, Rate: rate, Queries: int(rate * length.Seconds()),
			Sockets: sockets, Names: []string{uncached}, Unique: true, Timeout: patience,
		}}
	}
	return []*stream{make1("misses, fixed ports", 4), make1("misses, new ports", 0)}
}

// drive runs all streams; wait waits for their end and returns how many queries
// failed, of how many.
func (w *world) drive(streams []*stream) (wait func() (lost, sent int)) {
	w.t.Helper()
	var all sync.WaitGroup
	for _, s := range streams {
		all.Go(func() {
			r, err := s.load.Run(w.t.Context(), s.ns)
			if err != nil {
				w.t.Errorf("%s: %v", s.name, err)
			}
			s.result = r
		})
	}
	return func() (lost, sent int) {
		all.Wait()
		for _, s := range streams {
			if s.result == nil {
				w.t.Fatal("a load did not run")
			}
			lost, sent = lost+s.result.Failed(), sent+s.result.Sent
			if s.result.Failed() > 0 {
				w.t.Logf("%-22s %v", s.name, s.result)
			}
		}
		return lost, sent
	}
}

// after waits until a moment of a schedule.
func after(start time.Time, d time.Duration) { <-time.After(time.Until(start.Add(d))) }

// TestOutage: dnsguard is killed, hangs, leaves and is replaced under load, beside
// the real kube-proxy and in front of the real CoreDNS.
func TestOutage(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "nftables")
	n := w.nodes[0]

	t.Run("kill -9", func(t *testing.T) {
		w := w.in(t)
		g := w.guard(n)
		start := time.Now()
		streams := w.streams(4*time.Second, patience)
		wait := w.drive(streams)
		after(start, time.Second)
		g.Kill()
		dead := time.Since(start)
		after(start, 2*time.Second)
		young := w.guard(n)
		lost, sent := wait()
		t.Logf("kill -9 and a new start a second later: %d of %d lost", lost, sent)
		// What was in the dead process's hands, and what it had not read: as much as
		// came while it waited for a CPU. Then kube-proxy's path serves.
		for _, s := range streams {
			from, length := s.result.LongestOutage()
			if end := from + length; length > 0 && end > dead+300*time.Millisecond {
				t.Errorf("%s: no answers from %v to %v, but dead was dnsguard at %v", s.name, from, end, dead)
			}
		}
		if lost > (udpRate+tcpRate)/2 {
			t.Errorf("%d queries lost", lost)
		}
		if taken, err := young.Metric(w.soon(), "dnsguard_queries_total"); err != nil || taken < 100 {
			t.Errorf("the second dnsguard took %v queries, %v", taken, err)
		}
		w.leave(young)
	})

	t.Run("hang", func(t *testing.T) {
		w := w.in(t)
		g := w.guard(n)
		start := time.Now()
		streams := w.streams(5*time.Second, time.Second) // late is lost
		wait := w.drive(streams)
		after(start, time.Second)
		w.must(g.Signal(syscall.SIGSTOP))
		after(start, 3*time.Second)
		w.must(g.Signal(syscall.SIGCONT))
		lost, sent := wait()
		var worst time.Duration
		for _, s := range streams {
			_, length := s.result.LongestOutage()
			worst = max(worst, length)
		}
		t.Logf("SIGSTOP for 2 s: %d of %d lost, no client without answers for more than %v", lost, sent, worst)
		if worst > 1500*time.Millisecond { // aliveTimeout is 1 s; a busy machine
			t.Errorf("no answer for %v", worst)
		}
		w.must(g.AwaitReady(w.soon()))
		w.leave(g)
	})

	t.Run("upgrade", func(t *testing.T) {
		w := w.in(t)
		old := w.guard(n)
		start := time.Now()
		wait := w.drive(w.streams(5*time.Second, patience))
		after(start, 500*time.Millisecond)
		young := w.guard(n)
		w.leave(old)
		gone := time.Since(start)
		lost, sent := wait()
		t.Logf("upgrade, old one gone %v after the load began: %d of %d lost", gone.Round(100*time.Millisecond), lost, sent)
		if lost > 0 {
			t.Errorf("%d queries lost", lost)
		}
		w.leave(young)
	})

	t.Run("removal", func(t *testing.T) {
		w := w.in(t)
		g := w.guard(n)
		start := time.Now()
		wait := w.drive(w.streams(3*time.Second, patience))
		after(start, time.Second)
		w.leave(g)
		lost, sent := wait()
		t.Logf("removed under load: %d of %d lost", lost, sent)
		if lost > 0 {
			t.Errorf("%d queries lost", lost)
		}
	})
}

// leave ends dnsguard as kubelet does, and waits for its end.
func (w *world) leave(g *kubelab.Guard) {
	w.t.Helper()
	ctx := w.soon()
	if err := g.Stop(ctx); err != nil {
		w.t.Errorf("dnsguard: %v", err)
	}
}

// TestRollout: CoreDNS is replaced under load, kubelet's way: each new pod is
// ready before an old one is asked to leave. Every question goes all the way to
// CoreDNS; on a node without dnsguard some fail, on one with it none does.
func TestRollout(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	other := w.addPod(w.nodes[1], "client-b")
	t.Run("without dnsguard and with it", func(t *testing.T) {
		w := w.in(t)
		g := w.guard(w.nodes[0])
		defer w.leave(g)
		const length = 12 * time.Second
		without := w.drive(w.misses(other, length))
		with := w.drive(w.misses(w.client, length))
		old := append([]*kubelab.Pod(nil), w.dns...)
		w.each(len(old), func(i int) (err error) {
			w.dns[i] = w.addDNS(w.nodes[i])
			return old[i].Terminate(w.soon())
		})
		w.awaitServing(w.dns...)
		lost, sent := without()
		t.Logf("rollout without dnsguard: %d of %d lost", lost, sent)
		if lost == 0 {
			t.Error("nothing lost: the case shows nothing")
		}
		lost, sent = with()
		t.Logf("rollout with dnsguard: %d of %d lost", lost, sent)
		if lost > 0 {
			t.Errorf("%d queries lost", lost)
		}
	})
	t.Run("scale to zero and back", func(t *testing.T) {
		w := w.in(t)
		g := w.guard(w.nodes[0])
		defer w.leave(g)
		w.scaleToZero()
	})
}

// scaleToZero takes all CoreDNS pods away, and brings new ones.
func (w *world) scaleToZero() {
	t := w.t
	if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Fatal(err)
	}
	w.each(len(w.dns), func(i int) error { return w.dns[i].Terminate(w.soon()) })
	w.awaitServing()
	begin := time.Now()
	if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Errorf("a name that was asked for before, with no CoreDNS left: %v", err)
	}
	known := time.Since(begin)
	begin = time.Now()
	_, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, "never-asked."+uncached, 1)
	failed := time.Since(begin)
	if err == nil {
		t.Error("an answer out of nothing")
	}
	if failed > 3*time.Second { // 1.5 s, and a busy machine; the client would wait 5 s
		t.Errorf("a name that nobody can resolve took %v", failed)
	}
	begin = time.Now()
	w.each(len(w.dns), func(i int) error { w.dns[i] = w.addDNS(w.nodes[i]); return nil })
	up := time.Since(begin)
	w.awaitServing(w.dns...)
	tries := 0
	back := w.await("an answer after the return", func(ctx context.Context) error {
		tries++
		_, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, fmt.Sprintf("back-%d.%s", tries, uncached), 1)
		return err
	})
	t.Logf("no CoreDNS: a known name after %v, an unknown one fails after %v (%v); back (pods up in %v): first answer %v later", known.Round(time.Microsecond), failed.Round(time.Millisecond), err, up.Round(100*time.Millisecond), back.Round(time.Millisecond))
}

// TestProxyChange: kube-proxy is killed and started again, and changes its mode,
// under load; with dnsguard nothing is lost.
func TestProxyChange(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	n := w.nodes[0]
	g := w.guard(n)
	for _, to := range []string{"iptables", "nftables", "iptables"} {
		from := n.Proxy.Mode
		wait := w.drive(append(w.misses(w.client, 6*time.Second), w.streams(6*time.Second, patience)...))
		n.Proxy.Kill()
		w.must(n.StartProxy(w.soon(), to))
		w.awaitServing(w.dns...)
		lost, sent := wait()
		repairs, err := g.Metric(w.soon(), "dnsguard_intercept_repairs_total")
		w.must(err)
		t.Logf("kube-proxy killed, from %s to %s: %d of %d lost, %v repairs so far", from, to, lost, sent, repairs)
		if lost > 0 {
			t.Errorf("from %s to %s: %d queries lost", from, to, lost)
		}
	}
	w.leave(g)
	if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Errorf("after dnsguard: %v", err)
	}
}
