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

// play plays the incident, and leaves the world with one CoreDNS less.
func (w *world) play(in incident) recovery {
	w.t.Helper()
	first := make(chan struct{}) // the first answer
	healed := make(chan time.Duration, 1)
	var mu sync.Mutex
	var since time.Time // zero: not yet
	var once, heal sync.Once
	client, err := lab.NewPinnedClient(w.t.Context(), w.client.Namespace, lab.ClientConfig{
		Server: in.server, Interval: pinnedInterval, Timeout: time.Second,
		Name: func(int) string { return apiName },
		Observe: func(o lab.Outcome) {
			if o.Err != nil {
				return
			}
			once.Do(func() { close(first) })
			mu.Lock()
			defer mu.Unlock()
			if !since.IsZero() && o.Sent.After(since) {
				heal.Do(func() { healed <- o.Sent.Add(o.Took).Sub(since) })
			}
		},
	})
	w.must(err)
	defer func() { _ = client.Close() }()
	ctx, stop := context.WithCancel(w.t.Context())
	var outcomes lab.Timeline
	var running sync.WaitGroup
	running.Go(func() { outcomes = client.Run(ctx) })
	defer running.Wait()
	defer stop()
	select {
	case <-first:
	case <-time.After(eventually):
		w.t.Fatal("the pinned client had no answer before the incident")
	}
	victim := w.leads(client.Local, in.server)

	if in.stopped {
		w.must(w.nodes[0].Proxy.Signal(syscall.SIGSTOP))
	}
	w.must(victim.Die())
	begin := time.Now()
	w.must(victim.Delete(w.soon(), in.grace))
	mu.Lock()
	since = begin
	mu.Unlock()

	r := recovery{slice: -1, purge: -1, first: -1}
	dead := victim.IP4
	if in.server.Addr().Is6() {
		dead = victim.IP6
	}
	watch, cancel := context.WithTimeout(ctx, in.give)
	defer cancel()
	var looks sync.WaitGroup
	looks.Go(func() {
		r.slice = when(watch, begin, func(ctx context.Context) error { return w.stillReady(ctx, dead) })
	})
	looks.Go(func() {
		r.purge = when(watch, begin, func(context.Context) error {
			f, ok, err := w.nodes[0].FlowOf(client.Local, in.server)
			if ok && f.Endpoint.Addr() == dead {
				err = errors.New("still there")
			}
			return err
		})
	})
	healedOrNot := make(chan struct{})
	if in.grace > 0 {
		looks.Go(func() { // kubelet; it need not wait longer than the client
			select {
			case <-time.After(kubeletNotices):
			case <-healedOrNot:
			}
			if err := errors.Join(victim.Report(w.soon(), false), victim.Delete(w.soon(), 0)); err != nil {
				w.t.Error(err)
			}
		})
	}
	select {
	case r.first = <-healed:
	case <-watch.Done():
	}
	close(healedOrNot)
	if in.stopped {
		w.must(w.nodes[0].Proxy.Signal(syscall.SIGCONT))
	}
	looks.Wait() // they may lag behind the client
	stop()
	running.Wait()
	for _, o := range outcomes {
		if o.Sent.After(begin) && o.Err != nil {
			r.lost++
		}
	}
	return r
}

// awaitMet waits until the guard on the first node has had an answer of every
// CoreDNS: only what has answered can be called silent. It probes a new one within
// a second, and when that is not answered after guard.resync. The kernel remembers a
// probe for 30 s.
func (w *world) awaitMet() {
	w.t.Helper()
	w.await("the guard's first probes", func(context.Context) error {
		flows, err := w.nodes[0].Flows()
		if err != nil {
			return err
		}
		for _, f := range flows {
			if f.Replied && f.Client.Addr() != w.client.IP4 && f.Client.Addr() != w.client.IP6 {
				w.met[f.Frontend.Addr()] = true
			}
		}
		for _, d := range w.dns {
			if !w.met[d.IP4] || !w.met[d.IP6] {
				return fmt.Errorf("%s has not answered the guard's probes", d.Name)
			}
		}
		return nil
	})
}

// when looks until ok, and returns the time since begin, or -1 if it did not come.
func when(ctx context.Context, begin time.Time, ok func(context.Context) error) time.Duration {
	if kubelab.Await(ctx, "", ok) != nil {
		return -1
	}
	return time.Since(begin)
}

// leads returns the CoreDNS that a client's flow leads to.
func (w *world) leads(client, server netip.AddrPort) *kubelab.Pod {
	w.t.Helper()
	f, ok, err := w.nodes[0].FlowOf(client, server)
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

// TestIncident: a client that keeps its source port, as meshes do, and the CoreDNS
// that its flow leads to dies. With kube-proxy's own reconciler; with dnsguard's
// guard beside it, the pods still on kube-proxy's path; and both with a kube-proxy
// that hangs.
func TestIncident(t *testing.T) {
	evicted := incident{server: kubelab.DNS4, grace: 30, give: 2 * kubeletNotices}
	forced := incident{server: kubelab.DNS4, give: 15 * time.Second}
	forced6 := incident{server: kubelab.DNS6, give: 15 * time.Second}
	// Longer than any reconciler takes; nothing ends it.
	stopped := incident{server: kubelab.DNS4, stopped: true, give: 5 * time.Second}
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, mode)
			cases := []struct {
				name string
				incident
			}{
				{"evicted", evicted},
				{"force-deleted", forced},
				{"force-deleted, IPv6", forced6},
				{"force-deleted, kube-proxy stopped", stopped},
			}
			alone := make([]recovery, len(cases))
			for i, c := range cases {
				alone[i] = w.play(c.incident)
				t.Logf("%s, %s, kube-proxy alone: %v", mode, c.name, alone[i])
				w.restore()
			}
			if alone[0].first < kubeletNotices/2 {
				t.Errorf("kube-proxy alone healed an evicted pod's flow in %v: nothing to win", alone[0].first)
			}
			if alone[3].first >= 0 {
				t.Errorf("a stopped kube-proxy healed a flow in %v", alone[3].first)
			}

			g := w.guard(w.nodes[0], kubelab.GuardOnly()...)
			var without, with time.Duration // of those that were force-deleted, together
			for i, c := range cases {
				w.awaitMet()
				r := w.play(c.incident)
				t.Logf("%s, %s, with the guard: %v", mode, c.name, r)
				switch {
				case r.first < 0:
					t.Errorf("%s: not healed", c.name)
				case c.grace > 0 && r.first > alone[i].first/3:
					t.Errorf("%s: healed in %v with the guard, not much sooner than %v without", c.name, r.first, alone[i].first)
				case c.grace == 0 && !c.stopped:
					with, without = with+r.first, without+alone[i].first
				}
				w.restore()
			}
			if with > without {
				t.Errorf("force-deleted: healed in %v with the guard, in %v without", with, without)
			}
			deleted, err := g.Metric(w.soon(), "dnsguard_guard_deleted_total")
			w.must(err)
			sum, err := g.Metric(w.soon(), "dnsguard_guard_news_to_purge_seconds_sum")
			w.must(err)
			count, err := g.Metric(w.soon(), "dnsguard_guard_news_to_purge_seconds_count")
			w.must(err)
			t.Logf("%s: the guard deleted %v flows; news to purge %v on average of %v", mode, deleted, time.Duration(sum/max(count, 1)*float64(time.Second)).Round(time.Microsecond), count)
		})
	}
}
