package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
)

// incident is the death of the CoreDNS that a pinned client's flow leads to.
type incident struct {
	server  netip.AddrPort
	grace   int64         // of the pod's deletion
	stopped bool          // kube-proxy hangs meanwhile
	give    time.Duration // how long the client may stay without an answer
}

// recovery is when what came, since the deletion of the pod; negative: it did not.
type recovery struct {
	slice time.Duration // the endpoint is not ready, or gone, in the EndpointSlice
	purge time.Duration // the client's flow leads to it no more
	first time.Duration // the first answer to a question asked since
	lost  int           // questions without an answer
}

func (r recovery) String() string {
	ms := func(d time.Duration) string {
		if d < 0 {
			return "never"
		}
		return "+" + d.Round(time.Millisecond).String()
	}
	return fmt.Sprintf("slice %s, flow gone %s, first answer %s, %d lost", ms(r.slice), ms(r.purge), ms(r.first), r.lost)
}

// pinnedInterval is how often the pinned client asks.
const pinnedInterval = 50 * time.Millisecond

// side is where a pinned client is.
type side struct {
	node *kubelab.Node
	pod  *kubelab.Pod
}

// pinned is a client that keeps its source port and asks all the time, and the
// CoreDNS that its flow leads to.
type pinned struct {
	*lab.PinnedClient
	side
	leads  *kubelab.Pod
	healed chan time.Duration // the first answer to a question asked since the moment told by mark, and the time since
	stop   func() lab.Timeline

	mu    sync.Mutex
	since time.Time // zero: not yet
	once  sync.Once
}

// mark tells since when answers count.
func (p *pinned) mark(since time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.since = since
}

func (p *pinned) observe(o lab.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o.Err == nil && !p.since.IsZero() && o.Sent.After(p.since) {
		p.once.Do(func() { p.healed <- o.Sent.Add(o.Took).Sub(p.since) })
	}
}

// pin starts a client whose flow leads to one CoreDNS, or to any if it is nil. It
// ends with the test, if not before.
func (w *world) pin(s side, server netip.AddrPort, to *kubelab.Pod) *pinned {
	w.t.Helper()
	for range 64 { // each has an even chance
		p := w.pinAny(s, server)
		if to == nil || p.leads == to {
			return p
		}
		p.stop()
	}
	w.t.Fatalf("no flow on %s leads to %s", s.node.Name, to.Name)
	return nil
}

// pinAny starts a client and waits until it has been answered.
func (w *world) pinAny(s side, server netip.AddrPort) *pinned {
	w.t.Helper()
	p := &pinned{side: s, healed: make(chan time.Duration, 1)}
	first := make(chan struct{})
	var once sync.Once
	var err error
	p.PinnedClient, err = lab.NewPinnedClient(w.t.Context(), s.pod.Namespace, lab.ClientConfig{
		Server: server, Interval: pinnedInterval, Timeout: time.Second,
		Name: func(int) string { return apiName },
		Observe: func(o lab.Outcome) {
			if o.Err == nil {
				once.Do(func() { close(first) })
			}
			p.observe(o)
		},
	})
	w.must(err)
	ctx, cancel := context.WithCancel(w.t.Context())
	var outcomes lab.Timeline
	var running sync.WaitGroup
	running.Go(func() { outcomes = p.Run(ctx) })
	p.stop = sync.OnceValue(func() lab.Timeline {
		cancel()
		running.Wait()
		_ = p.Close() // of a datagram socket
		return outcomes
	})
	w.t.Cleanup(func() { p.stop() })
	select {
	case <-first:
	case <-time.After(eventually):
		w.t.Fatal("the pinned client had no answer before the incident")
	}
	p.leads = w.leads(s.node, p.Local, server)
	return p
}

// play plays the incident for a pinned client on the first node.
func (w *world) play(in incident) recovery {
	w.t.Helper()
	return w.playAll(in, side{w.nodes[0], w.client})[0]
}

// playAll plays the incident for a pinned client on each side, which all lead to the
// same CoreDNS, and leaves the world with one CoreDNS less.
func (w *world) playAll(in incident, sides ...side) []recovery {
	w.t.Helper()
	clients := []*pinned{w.pin(sides[0], in.server, nil)}
	victim := clients[0].leads
	for _, s := range sides[1:] {
		clients = append(clients, w.pin(s, in.server, victim))
	}
	proxies := func(sig syscall.Signal) {
		if in.stopped {
			w.each(len(sides), func(i int) error { return sides[i].node.Proxy.Signal(sig) })
		}
	}
	proxies(syscall.SIGSTOP)
	w.must(victim.Die())
	begin := time.Now()
	w.must(victim.Delete(w.soon(), in.grace))
	for _, p := range clients {
		p.mark(begin)
	}

	dead := victim.IP4
	if in.server.Addr().Is6() {
		dead = victim.IP6
	}
	watch, cancel := context.WithTimeout(w.t.Context(), in.give)
	defer cancel()
	recoveries := make([]recovery, len(clients))
	slice := time.Duration(-1)
	var looks, heals sync.WaitGroup
	looks.Go(func() {
		slice = when(watch, begin, func(ctx context.Context) error { return w.stillReady(ctx, dead) })
	})
	for i, p := range clients {
		r := &recoveries[i]
		*r = recovery{slice: -1, purge: -1, first: -1}
		looks.Go(func() {
			r.purge = when(watch, begin, func(context.Context) error {
				f, ok, err := p.node.FlowOf(p.Local, in.server)
				if ok && f.Endpoint.Addr() == dead {
					err = errors.New("still there")
				}
				return err
			})
		})
		heals.Go(func() {
			select {
			case r.first = <-p.healed:
			case <-watch.Done():
			}
		})
	}
	healedOrNot := make(chan struct{})
	if in.grace > 0 {
		looks.Go(func() { // kubelet; it need not wait longer than the clients
			select {
			case <-time.After(kubeletNotices):
			case <-healedOrNot:
			}
			if err := errors.Join(victim.Report(w.soon(), false), victim.Delete(w.soon(), 0)); err != nil {
				w.t.Error(err)
			}
		})
	}
	heals.Wait()
	close(healedOrNot)
	proxies(syscall.SIGCONT)
	looks.Wait() // they may lag behind the clients
	for i, p := range clients {
		recoveries[i].slice = slice
		for _, o := range p.stop() {
			if o.Sent.After(begin) && o.Err != nil {
				recoveries[i].lost++
			}
		}
	}
	return recoveries
}

// awaitMet waits until the guard on a node has had an answer of every CoreDNS: only
// what has answered can be called silent. It probes a new one within a second, and
// when that is not answered after guard.resync. The kernel remembers a probe for 30 s.
func (w *world) awaitMet(n *kubelab.Node) {
	w.t.Helper()
	others := map[netip.Addr]bool{w.client.IP4: true, w.client.IP6: true} // who asks a CoreDNS of this node, too
	for _, o := range w.nodes {
		if o != n {
			others[o.IP4], others[o.IP6] = true, true
		}
	}
	w.await("the guard's first probes on "+n.Name, func(context.Context) error {
		flows, err := n.Flows()
		if err != nil {
			return err
		}
		for _, f := range flows {
			if f.Replied && !others[f.Client.Addr()] {
				w.met[meeting{n.Name, f.Frontend.Addr()}] = true
			}
		}
		for _, d := range w.dns {
			if !w.met[meeting{n.Name, d.IP4}] || !w.met[meeting{n.Name, d.IP6}] {
				return fmt.Errorf("%s has not answered the guard's probes", d.Name)
			}
		}
		return nil
	})
}

// meeting is a node's guard and an address that has answered it.
type meeting struct {
	node string
	addr netip.Addr
}

// when looks until ok, and returns the time since begin, or -1 if it did not come.
func when(ctx context.Context, begin time.Time, ok func(context.Context) error) time.Duration {
	if kubelab.Await(ctx, "", ok) != nil {
		return -1
	}
	return time.Since(begin)
}

// leads returns the CoreDNS that a client's flow on a node leads to.
func (w *world) leads(n *kubelab.Node, client, server netip.AddrPort) *kubelab.Pod {
	w.t.Helper()
	f, ok, err := n.FlowOf(client, server)
	if err != nil || !ok {
		w.t.Fatalf("the flow of %v to %v: %v, %v", client, server, ok, err)
	}
	for _, d := range w.dns {
		if f.Endpoint.Addr() == d.IP4 || f.Endpoint.Addr() == d.IP6 {
			return d
		}
	}
	w.t.Fatalf("%v leads to no CoreDNS", f)
	return nil
}

// stillReady is an error while kube-dns's slices call an address ready.
func (w *world) stillReady(ctx context.Context, a netip.Addr) error {
	all := w.endpoints(ctx)
	if len(all) == 0 {
		return errors.New("no slices")
	}
	for _, e := range all {
		if e.Addresses[0] == a.String() && ready(e) {
			return errors.New("still ready")
		}
	}
	return nil
}

func ready(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }

// TestIncident: clients that keep their source port, as meshes do, on a node with each
// mode of kube-proxy, and the CoreDNS that their flows lead to dies. With kube-proxy's
// own reconciler; with dnsguard's guard beside it, the pods still on kube-proxy's path;
// and both with a kube-proxy that hangs.
func TestIncident(t *testing.T) {
	evicted := incident{server: kubelab.DNS4, grace: 30, give: 2 * kubeletNotices}
	forced := incident{server: kubelab.DNS4, give: 15 * time.Second}
	forced6 := incident{server: kubelab.DNS6, give: 15 * time.Second}
	// Longer than any reconciler takes; nothing ends it.
	stopped := incident{server: kubelab.DNS4, stopped: true, give: 5 * time.Second}
	w := newWorld(t, modes...)
	sides := []side{{w.nodes[0], w.client}, {w.nodes[1], w.addPod(w.nodes[1], "client-b")}}
	cases := []struct {
		name string
		incident
	}{
		{"evicted", evicted},
		{"force-deleted", forced},
		{"force-deleted, IPv6", forced6},
		{"force-deleted, kube-proxy stopped", stopped},
	}
	alone := make([][]recovery, len(cases))
	for i, c := range cases {
		alone[i] = w.playAll(c.incident, sides...)
		for s, r := range alone[i] {
			t.Logf("%s, %s, kube-proxy alone: %v", modes[s], c.name, r)
		}
		w.restore()
	}
	for s, mode := range modes {
		if first := alone[0][s].first; first < kubeletNotices/2 {
			t.Errorf("kube-proxy (%s) alone healed an evicted pod's flow in %v: nothing to win", mode, first)
		}
		if first := alone[3][s].first; first >= 0 {
			t.Errorf("a stopped kube-proxy (%s) healed a flow in %v", mode, first)
		}
	}

	guards := make([]*kubelab.Guard, len(sides))
	for s := range sides {
		guards[s] = w.guard(sides[s].node, kubelab.GuardOnly()...)
	}
	without, with := make([]time.Duration, len(sides)), make([]time.Duration, len(sides)) // of those that were force-deleted, together
	for i, c := range cases {
		for _, s := range sides {
			w.awaitMet(s.node)
		}
		for s, r := range w.playAll(c.incident, sides...) {
			t.Logf("%s, %s, with the guard: %v", modes[s], c.name, r)
			before := alone[i][s]
			switch {
			case r.first < 0:
				t.Errorf("%s, %s: not healed", modes[s], c.name)
			case c.grace > 0 && r.first > before.first/3:
				t.Errorf("%s, %s: healed in %v with the guard, not much sooner than %v without", modes[s], c.name, r.first, before.first)
			case c.grace == 0 && !c.stopped:
				with[s], without[s] = with[s]+r.first, without[s]+before.first
			}
		}
		w.restore()
	}
	for s, g := range guards {
		if with[s] > without[s] {
			t.Errorf("%s, force-deleted: healed in %v with the guard, in %v without", modes[s], with[s], without[s])
		}
		deleted, err := g.Metric(w.soon(), "dnsguard_guard_deleted_total")
		w.must(err)
		sum, err := g.Metric(w.soon(), "dnsguard_guard_news_to_purge_seconds_sum")
		w.must(err)
		count, err := g.Metric(w.soon(), "dnsguard_guard_news_to_purge_seconds_count")
		w.must(err)
		t.Logf("%s: the guard deleted %v flows; news to purge %v on average of %v", modes[s], deleted, time.Duration(sum/max(count, 1)*float64(time.Second)).Round(time.Microsecond), count)
	}
}
