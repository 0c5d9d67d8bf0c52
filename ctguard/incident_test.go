package ctguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// node is a namespace that plays a node with two DNS pods and kube-proxy. Pods
// are addresses of lo, clients sockets: translation, tracking and the fixed
// source port are all real.
type node struct {
	*namespace
	kernel *Kernel
	guard  *Guard
}

func newNode(t testing.TB, change func(*Config)) *node {
	t.Helper()
	n := &node{namespace: newNamespace(t)}
	n.kernel = n.namespace.kernel()
	for _, a := range []string{"10.96.0.10/32", "10.244.0.3/32", "10.244.0.4/32", "fd00:10:96::a/128", "fd00:10:244::3/128", "fd00:10:244::4/128"} {
		n.addAddr("lo", a)
	}
	cfg := Config{Table: n.kernel, Events: n.kernel, Host: n.kernel}
	if change != nil {
		change(&cfg)
	}
	g, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n.guard = g
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return n
}

// proxy has kube-proxy send new flows to an endpoint.
func (n *node) proxy(vip, to string) {
	n.t.Helper()
	n.rules(route{netip.MustParseAddrPort(vip), netip.MustParseAddrPort(to)})
}

// pod is a DNS server that says its address.
func (n *node) pod(addr string) { go answer(n.listen(addr)) }

// deadPod takes packets and says nothing, like an address that is routed to
// nowhere.
func (n *node) deadPod(addr string) { n.listen(addr) }

// query asks and returns who answered, or "" if nobody did in time.
func query(t testing.TB, c *net.UDPConn, vip string, within time.Duration) string {
	t.Helper()
	q := []byte{0x12, 0x34, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	if _, err := c.WriteToUDPAddrPort(q, netip.MustParseAddrPort(vip)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 512)
	m, _, err := c.ReadFromUDPAddrPort(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[len(q):m])
}

// eventually polls the kernel or the guard, which have no other way to tell.
func eventually(t testing.TB, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Since(began) > 10*time.Second {
			t.Fatalf("%s: not within %v", what, time.Since(began))
		}
		<-tick.C
	}
	return time.Since(began)
}

// settled waits until the guard has swept for what it was told.
func (n *node) settled() {
	n.t.Helper()
	before := n.guard.Stats().Sweeps
	n.guard.mu.Lock()
	n.guard.todo.sweep = true
	n.guard.mu.Unlock()
	n.guard.kick()
	eventually(n.t, "sweep", func() bool { return n.guard.Stats().Sweeps > before })
}

func snapshotOf(es ...Endpoint) *Snapshot {
	s := services(kubeDNS(es...))
	return &s
}

func up(addr string) Endpoint { return Endpoint{Addr: netip.MustParseAddrPort(addr), Serving: true} }

// TestIncident is the incident: a client that keeps its port is bound to a
// dead pod although the rules have long changed.
func TestIncident(t *testing.T) {
	for _, tt := range []struct{ name, local, vip, dead, living string }{
		{"IPv4", "127.0.0.1:0", vip4, podA, podB},
		{"IPv6", "[::1]:0", vip6, pod6, "[fd00:10:244::4]:5353"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t, nil)
			n.deadPod(tt.dead)
			n.pod(tt.living)
			n.guard.Update(snapshotOf(up(tt.dead), up(tt.living)))
			n.proxy(tt.vip, tt.dead)
			c := n.listen(tt.local)
			// More than once: IPv6 needs a moment in a fresh namespace, in which
			// it drops packets.
			eventually(t, "flow to the dead pod", func() bool {
				if who := query(t, c, tt.vip, 20*time.Millisecond); who != "" {
					t.Fatalf("the dead pod answered: %q", who)
				}
				return len(collect(t, n.kernel, match(tt.vip, tt.dead))) == 1
			})
			n.proxy(tt.vip, tt.living)
			n.settled()
			for range 3 {
				if who := query(t, c, tt.vip, 50*time.Millisecond); who != "" {
					t.Fatalf("not bound to the dead pod: %q answered", who)
				}
			}
			news := time.Now()
			n.guard.Update(snapshotOf(up(tt.living)))
			purged := eventually(t, "purge", func() bool { return n.guard.Stats().Deleted[EndpointGone] == 1 })
			if who := query(t, c, tt.vip, time.Second); who != tt.living {
				t.Errorf("%q answered, want %q", who, tt.living)
			}
			t.Logf("purged %v, and healed %v after the news", purged, time.Since(news))
			// Tens of milliseconds, but not on a machine at work.
			if purged > 3*time.Second {
				t.Errorf("purged only after %v", purged)
			}
		})
	}
}

// TestLaggingProxy: the rules name the dead pod for another second after the
// news. A single early purge would leave the client bound to it for good.
func TestLaggingProxy(t *testing.T) {
	n := newNode(t, nil)
	n.deadPod(podA)
	n.pod(podB)
	n.guard.Update(snapshotOf(up(podA), up(podB)))
	n.proxy(vip4, podA)
	n.settled()
	clients := make([]*net.UDPConn, 4)
	for i := range clients {
		clients[i] = n.listen("127.0.0.1:0")
	}
	var changed atomic.Int64 // when the rules did, in ns since news
	news := time.Now()
	n.guard.Update(snapshotOf(up(podB)))
	healed := make([]time.Duration, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() {
			for time.Since(news) < 5*time.Second && healed[i] == 0 {
				if query(t, c, vip4, 20*time.Millisecond) == podB {
					healed[i] = time.Since(news)
				}
			}
		})
	}
	timer := time.NewTimer(1200 * time.Millisecond)
	defer timer.Stop()
	<-timer.C
	n.proxy(vip4, podB)
	changed.Store(int64(time.Since(news)))
	wg.Wait()
	for i, d := range healed {
		after := d - time.Duration(changed.Load())
		t.Logf("client %d healed %v after the rules changed", i, after)
		// The next sweep, 1.8 s after the change, would be too late.
		if d == 0 || after > 1500*time.Millisecond {
			t.Errorf("client %d: healed after %v, rules changed after %v", i, d, time.Duration(changed.Load()))
		}
	}
	if s := n.guard.Stats(); s.Recreated < 10 {
		t.Errorf("%d flows counted as made again", s.Recreated)
	}
}

// nsProber probes from within the node's namespace.
type nsProber struct {
	n *node
	p Prober
}

func (p nsProber) Probe(ctx context.Context, at netip.AddrPort) error {
	done := make(chan error, 1)
	go func() { // not in the namespace's one thread: the second probe must not wait for the first
		runtime.LockOSThread() // and never unlock: the thread ends here
		if err := unix.Setns(p.n.fd, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter namespace: %w: %w", ErrNotSent, err)
			return
		}
		done <- p.p.Probe(ctx, at)
	}()
	return <-done
}

// TestGracefulDeleteOfDeadPod is the case that kube-proxy strands for ten
// seconds: the endpoint is serving and terminating, and nobody is there.
func TestGracefulDeleteOfDeadPod(t *testing.T) {
	probe, err := NewUDPProber("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	var prober nsProber
	n := newNode(t, func(c *Config) {
		prober.p = probe
		c.Prober = &prober
	})
	prober.n = n
	alive := n.listen(podA)
	go answer(alive)
	n.pod(podB)
	n.proxy(vip4, podA)
	n.guard.Update(snapshotOf(up(podA), up(podB)))
	c := n.listen("127.0.0.1:0")
	if who := query(t, c, vip4, time.Second); who != podA {
		t.Fatalf("%q answered", who)
	}
	n.probed(podA)
	_ = alive.Close()
	n.deadPod(podA)
	n.proxy(vip4, podB)
	news := time.Now()
	leaving := up(podA)
	leaving.Terminating = true
	n.guard.Update(snapshotOf(leaving, up(podB)))
	eventually(t, "purge", func() bool { return n.guard.Stats().Deleted[TerminatingSilent] == 1 })
	who := query(t, c, vip4, time.Second)
	took := time.Since(news)
	// A third of a second, but not on a machine at work.
	if who != podB || took > 3*time.Second {
		t.Errorf("%q answered, %v after the news", who, took)
	}
	t.Logf("healed %v after the news", took)
}

// TestEvidenceInKernel: the pod is ready by its EndpointSlice, and dead.
func TestEvidenceInKernel(t *testing.T) {
	probe, err := NewUDPProber("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	var prober nsProber
	n := newNode(t, func(c *Config) {
		prober.p = probe
		c.Prober, c.Evidence = &prober, true
	})
	prober.n = n
	alive := n.listen(podA)
	go answer(alive)
	n.pod(podB)
	n.proxy(vip4, podA)
	n.guard.Update(snapshotOf(up(podA), up(podB)))
	n.probed(podA)
	_ = alive.Close()
	n.deadPod(podA)
	died := time.Now()
	c := n.listen("127.0.0.1:0")
	if who := query(t, c, vip4, 10*time.Millisecond); who != "" {
		t.Fatalf("%q answered", who)
	}
	n.proxy(vip4, podB) // the next roll of the dice
	eventually(t, "purge", func() bool { return n.guard.Stats().Deleted[Unanswered] == 1 })
	if who := query(t, c, vip4, time.Second); who != podB {
		t.Errorf("%q answered", who)
	}
	t.Logf("healed %v after the death", time.Since(died))
}

// probed waits until a pod has answered a probe.
func (n *node) probed(pod string) {
	n.t.Helper()
	eventually(n.t, "first probe", func() bool {
		for f, err := range n.kernel.Flows(n.t.Context(), []Match{match(pod)}) {
			if err == nil && f.SeenReply && f.Orig.Src.Addr() == f.Orig.Dst.Addr() {
				return true
			}
		}
		return false
	})
}

// TestReplyInFlight: a lame duck has a query in hand. The reply arrives.
func TestReplyInFlight(t *testing.T) {
	n := newNode(t, nil)
	slow := n.listen(podA)
	release := make(chan struct{})
	go func() {
		buf := make([]byte, 512)
		m, from, err := slow.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		<-release
		_, _ = slow.WriteToUDPAddrPort(append(buf[:m:m], podA...), from)
	}()
	n.pod(podB)
	n.proxy(vip4, podA)
	n.guard.Update(snapshotOf(up(podA), up(podB)))
	n.settled()
	c := n.listen("127.0.0.1:0")
	got := make(chan string)
	go func() { got <- query(t, c, vip4, 5*time.Second) }()
	eventually(t, "flow", func() bool { return len(collect(t, n.kernel, match(vip4))) == 1 })
	leaving := up(podA)
	leaving.Terminating = true
	n.guard.Update(snapshotOf(leaving, up(podB)))
	for range 5 {
		n.settled()
	}
	close(release)
	if who := <-got; who != podA {
		t.Errorf("%q answered: the reply in flight was lost", who)
	}
	if s := n.guard.Stats(); len(s.Deleted) != 0 || s.Flows[Held] != 1 {
		t.Errorf("stats %+v", s)
	}
}

// TestLivingFlowsUnderLoad: clients of a living pod ask as fast as they can,
// while another endpoint comes and goes and its flows are deleted.
func TestLivingFlowsUnderLoad(t *testing.T) {
	n := newNode(t, nil)
	n.pod(podB)
	n.proxy(vip4, podB)
	n.guard.Update(snapshotOf(up(podB)))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var asked, lost atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		fixed := n.listen("127.0.0.1:0")
		wg.Go(func() {
			for ctx.Err() == nil {
				asked.Add(1)
				if query(t, fixed, vip4, 2*time.Second) != podB {
					lost.Add(1)
				}
			}
		})
	}
	purged := uint64(0)
	for i := 0; ctx.Err() == nil; i++ {
		client := fmt.Sprintf("10.244.1.%d:%d", i%250+1, 1024+i)
		n.guard.Update(snapshotOf(up(podA), up(podB)))
		n.fill([]Flow{flow(client, vip4, podA)})
		n.guard.Update(snapshotOf(up(podB)))
		purged++
		eventually(t, "purge", func() bool {
			s := n.guard.Stats()
			return s.Deleted[EndpointGone]+s.Deleted[PortChanged] >= purged
		})
	}
	wg.Wait()
	if lost.Load() != 0 {
		t.Errorf("%d of %d queries lost", lost.Load(), asked.Load())
	}
	t.Logf("%d queries, none lost, beside %d purges", asked.Load(), purged)
}

// TestNewerFlowOfTheSameClient: the client has moved to a living pod between
// the guard's look at the table and its deletion.
func TestNewerFlowOfTheSameClient(t *testing.T) {
	n := newNode(t, nil)
	n.deadPod(podA)
	n.pod(podB)
	n.proxy(vip4, podA)
	c := n.listen("127.0.0.1:0")
	query(t, c, vip4, 10*time.Millisecond)
	stale := collect(t, n.kernel, match(vip4))
	if len(stale) != 1 {
		t.Fatalf("flows %v", stale)
	}
	if removed, err := n.kernel.Delete(t.Context(), stale); err != nil || !removed[0] {
		t.Fatalf("Delete = %v, %v", removed, err)
	}
	n.proxy(vip4, podB)
	if who := query(t, c, vip4, time.Second); who != podB {
		t.Fatalf("%q answered", who)
	}
	if removed, err := n.kernel.Delete(t.Context(), stale); err != nil || removed[0] {
		t.Errorf("second Delete = %v, %v", removed, err)
	}
	if living := collect(t, n.kernel, match(vip4)); len(living) != 1 || living[0].Reply.Src.String() != podB {
		t.Errorf("flows %v", living)
	}
}

// TestZones: the flows of the link-local fallback are in a zone of their own.
func TestZones(t *testing.T) {
	for _, tt := range []struct {
		name  string
		zones []uint16
		want  string // who answers after the endpoint is gone
	}{
		{"ours", []uint16{5353}, podB},
		{"someone else's", nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t, func(c *Config) { c.Zones = tt.zones })
			n.deadPod(podA)
			n.pod(podB)
			n.guard.Update(snapshotOf(up(podA), up(podB)))
			n.proxy(vip4, podA)
			n.zone(5353)
			c := n.listen("127.0.0.1:0")
			query(t, c, vip4, 10*time.Millisecond)
			fs := collect(t, n.kernel, match(vip4))
			if len(fs) != 1 || fs[0].Zone != 5353 {
				t.Fatalf("flows %v", fs)
			}
			n.proxy(vip4, podB)
			n.guard.Update(snapshotOf(up(podB)))
			n.settled()
			if who := query(t, c, vip4, 200*time.Millisecond); who != tt.want {
				t.Errorf("%q answered, want %q", who, tt.want)
			}
		})
	}
}

// TestLameDuckInKernel: of two flows to an endpoint that terminates, the idle
// one is moved.
func TestLameDuckInKernel(t *testing.T) {
	n := newNode(t, nil)
	busy, idle := flow("10.244.1.1:1", vip4, podA), flow("10.244.1.1:2", vip4, podA)
	busy.Remaining, idle.Remaining = 120*time.Second, 20*time.Second
	n.fill([]Flow{busy, idle})
	leaving := up(podA)
	leaving.Terminating = true
	n.guard.Update(snapshotOf(leaving, up(podB)))
	eventually(t, "purge", func() bool { return n.guard.Stats().Deleted[TerminatingIdle] == 1 })
	if left := collect(t, n.kernel, match(vip4)); len(left) != 1 || left[0].Orig != busy.Orig {
		t.Errorf("flows %v", left)
	}
}

// TestKnownInKernel: the kernel's own flows, told of by its events, go at the
// news without a dump, while packets come; one of the same client to another pod
// stays.
func TestKnownInKernel(t *testing.T) {
	for _, tt := range []struct{ name, local, vip, dead, living string }{
		{"IPv4", "127.0.0.1:0", vip4, podA, podB},
		{"IPv6", "[::1]:0", vip6, pod6, "[fd00:10:244::4]:5353"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t, nil)
			n.pod(tt.dead)
			n.pod(tt.living)
			n.guard.Update(snapshotOf(up(tt.dead), up(tt.living)))
			n.settled()
			clients := make([]*net.UDPConn, 2)
			for i, to := range []string{tt.dead, tt.living} {
				n.proxy(tt.vip, to)
				clients[i] = n.listen(tt.local)
				eventually(t, "first answer", func() bool { return query(t, clients[i], tt.vip, 50*time.Millisecond) == to })
			}
			eventually(t, "both to be known", func() bool { return n.guard.Stats().Known >= 2 })
			n.guard.Update(snapshotOf(up(tt.living)))
			eventually(t, "purge", func() bool { return n.guard.Stats().Deleted[EndpointGone] == 1 })
			if s := n.guard.Stats(); s.DeletedEarly != 1 {
				t.Errorf("%d deleted early", s.DeletedEarly)
			}
			for i, c := range clients {
				if who := query(t, c, tt.vip, time.Second); who != tt.living {
					t.Errorf("client %d: %q answered", i, who)
				}
			}
		})
	}
}
