package ctguard

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Run guards until ctx ends, and returns nil then. It must be called once.
func (g *Guard) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	r := &runner{
		Guard:     g,
		schedule:  schedule{resync: g.cfg.Resync, evidence: g.know.evidence},
		followers: make(map[netip.AddrPort]*follower),
	}
	defer r.stop()
	defer cancel()
	r.begin()
	r.tasks.Go(func() { r.hasten(ctx) })
	r.tasks.Go(func() { r.meet(ctx) })
	// Nothing to do before the first kick.
	timer := time.NewTimer(g.cfg.Resync)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.kicks:
			r.kicked(ctx)
		case <-timer.C:
			r.sweep(ctx)
		}
		now := time.Now()
		timer.Reset(r.schedule.next(now).Sub(now))
	}
}

// begin has endpoints that are not known probed from now on, if there is a Prober.
func (g *Guard) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.know.probes = g.cfg.Prober != nil; g.know.probes {
		g.policy.Store(g.know.policy())
	}
}

// runner is what belongs to Run's goroutine.
type runner struct {
	*Guard
	schedule  schedule
	followers map[netip.AddrPort]*follower
	waiting   map[flowKey]counts // flows that waited for replies at the last sweep
	events    *listener          // nil before the first subscription
	quiet     [2]quiet           // by family
	tasks     sync.WaitGroup
}

// listener is a subscription in use.
type listener struct {
	Subscription
	ports  []uint16
	broken atomic.Bool // it has ended by itself
}

func (r *runner) stop() {
	if r.events != nil {
		_ = r.events.Close()
	}
	r.tasks.Wait()
}

// kicked takes up what there is to do.
func (r *runner) kicked(ctx context.Context) {
	r.mu.Lock()
	t := r.todo
	r.todo = todo{}
	r.mu.Unlock()
	if t.change {
		r.schedule.change(time.Now())
		r.follow(ctx)
	}
	r.schedule.soon = r.schedule.soon || t.sweep
	r.schedule.retry = r.schedule.retry || t.retry
}

// follow starts a follower for each endpoint that serves, and ends those of
// endpoints that have left.
func (r *runner) follow(ctx context.Context) {
	p := r.policy.Load()
	if r.cfg.Prober == nil || p == nil {
		return
	}
	now := p.servingEndpoints()
	for at, terminating := range now {
		f := r.followers[at]
		if f == nil {
			f = &follower{endpoint: at, wake: make(chan struct{}, 1)}
			f.terminating.Store(terminating)
			r.followers[at] = f
			var fctx context.Context
			fctx, f.cancel = context.WithCancel(ctx)
			r.tasks.Go(func() { f.follow(fctx, r.cfg.Prober, r.cfg.Resync, r) })
		}
		f.turn(terminating)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for at, f := range r.followers {
		if _, still := now[at]; !still {
			f.cancel()
			delete(r.followers, at)
			delete(r.know.silent, at)
			delete(r.answered, at)
		}
	}
}

// answers implements [court].
func (g *Guard) answers(ctx context.Context, at netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ctx.Err() == nil {
		g.answered[at] = true
	}
}

// heard implements [court].
func (g *Guard) heard(ctx context.Context, at netip.AddrPort, silent bool) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if ctx.Err() != nil || !set(g.know.silent, at, silent) {
		return
	}
	if silent {
		g.condemned(now)
	}
	g.learned()
}

// othersAnswer implements [court]. Others are those that have answered before,
// of the same family, at another address; without any, nobody can tell.
func (g *Guard) othersAnswer(ctx context.Context, p Prober, at netip.AddrPort) bool {
	g.mu.Lock()
	var others []netip.AddrPort
	for o := range g.answered {
		if o.Addr() != at.Addr() && o.Addr().Is4() == at.Addr().Is4() {
			others = append(others, o)
		}
	}
	g.mu.Unlock()
	if len(others) == 0 {
		return true
	}
	return someAnswer(ctx, p, others)
}

// someAnswer asks some of the endpoints, and tells whether one answers.
func someAnswer(ctx context.Context, p Prober, others []netip.AddrPort) bool {
	rand.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	var probes sync.WaitGroup
	defer probes.Wait()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	results := make(chan error, mostWitnesses)
	asked := others[:min(len(others), mostWitnesses)]
	for _, o := range asked {
		probes.Go(func() { results <- p.Probe(ctx, o) })
	}
	for range asked {
		if <-results == nil {
			return true
		}
	}
	return false
}

// subscribe sees to it that new flows to the present ports are reported.
func (r *runner) subscribe(ctx context.Context, ports []uint16) {
	l := r.events
	if r.cfg.Events == nil || len(ports) == 0 || l != nil && !l.broken.Load() && slices.Equal(l.ports, ports) {
		return
	}
	sub, err := r.cfg.Events.Subscribe(ports)
	if err != nil {
		r.failed(OpSubscribe)
		return
	}
	// The two overlap, so that nothing is missed. What is reported twice is
	// deleted once.
	if l != nil {
		_ = l.Close()
	}
	r.events = &listener{Subscription: sub, ports: ports}
	l = r.events
	r.tasks.Go(func() { r.listen(ctx, l) })
}

// listen judges new flows until the subscription ends.
func (g *Guard) listen(ctx context.Context, l *listener) {
	for {
		f, err := l.Next()
		switch {
		case err == nil:
			g.created(ctx, f)
		case errors.Is(err, ErrEventsLost):
			// The kernel says so once, and goes on losing events until what
			// waits has been read. So once more a little later.
			g.mu.Lock()
			g.stats.EventsLost++
			g.told = [2]bool{true, true}
			g.todo.sweep, g.todo.retry = true, true
			g.mu.Unlock()
			g.kick()
		case errors.Is(err, net.ErrClosed):
			return
		default:
			l.broken.Store(true)
			g.failed(OpEvents)
			return
		}
	}
}
