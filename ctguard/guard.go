package ctguard

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Config is what a [Guard] needs. Only Table is required.
type Config struct {
	Table Table

	// Events reports new flows. Without it the guard sweeps, and flows that
	// lagging rules make again live until the next sweep.
	Events Events

	// Host tells the kernel's timeouts and whether there is IPVS. Without it
	// [DefaultTimeouts] hold.
	Host Host

	// Prober probes endpoints. Without it, flows to endpoints that terminate
	// are moved when idle, and none is believed dead.
	Prober Prober

	// Zones are the conntrack zones to guard beside the default zone 0.
	Zones []uint16

	// Resync is the time between sweeps when nothing happens: 30 s if zero.
	Resync time.Duration

	// Limit bounds deletions: [DefaultLimit] if zero.
	Limit Limit

	// Evidence looks for endpoints that are dead although their EndpointSlice
	// says that they serve, as after the loss of a node: flows with queries
	// and no replies raise the suspicion, the Prober confirms it, and then
	// unanswered flows are deleted, unless no other endpoint is left. It reads
	// the table every five seconds. To see more than flows that have never
	// been answered, it needs conntrack accounting, which the sysctl
	// nf_conntrack_acct or an nft rule with "ct packets" turns on.
	Evidence bool

	// DryRun judges and reports, but deletes nothing.
	DryRun bool

	// OnPurge is told of each flow that was deleted, or that a dry run would
	// have deleted. It is never called twice at the same time, must not call
	// the guard, and should return soon.
	OnPurge func(Purge)

	// OnState is told of each change of state, under the same conditions.
	OnState func(State)
}

// Finding is a flow to a frontend, and what the policy makes of it.
type Finding struct {
	Flow     Flow
	Frontend Frontend
	Verdict  Verdict
	Reason   Reason
}

// Purge is a finding that was acted on.
type Purge struct {
	Finding

	// Event tells that the flow was deleted when it was made, not by a sweep.
	Event bool

	// DryRun tells that it was not deleted at all.
	DryRun bool
}

// Guard keeps the table free of stale flows. [Guard.Update] gives it the
// news, [Guard.Run] does the work. Its methods are safe for concurrent use.
type Guard struct {
	cfg    Config
	policy atomic.Pointer[Policy] // nil before the first snapshot
	kicks  chan struct{}          // capacity 1: something is to be looked at

	callbacks sync.Mutex // held while OnPurge or OnState runs

	mu       sync.Mutex // guards what follows
	know     *knowledge
	seen     bool      // some flow to a frontend has been seen
	held     bool      // some flow was held since it is not translated
	todo     todo      // what Run has been kicked for
	news     time.Time // the oldest news that no sweep has dealt with, or zero
	broken   Subscription
	bucket   bucket
	stats    Stats
	reported map[flowKey]bool // what a dry run has reported already
}

// todo is what Run has been kicked for.
type todo struct {
	change bool // verdicts differ: begin a series of sweeps
	sweep  bool // sweep now
	retry  bool // something was left undone: sweep soon
}

// flowKey identifies a flow.
type flowKey struct {
	orig, reply Tuple
	zone        uint16
}

func keyOf(f Flow) flowKey { return flowKey{f.Orig, f.Reply, f.Zone} }

// New makes a guard. It does nothing before [Guard.Run].
func New(cfg Config) (*Guard, error) {
	if cfg.Table == nil {
		return nil, errors.New("guard without a conntrack table")
	}
	cfg.Resync = cmp.Or(cfg.Resync, 30*time.Second)
	if cfg.Limit == (Limit{}) {
		cfg.Limit = DefaultLimit
	}
	return &Guard{
		cfg:    cfg,
		kicks:  make(chan struct{}, 1),
		know:   newKnowledge(cfg.Zones, cfg.Evidence && cfg.Prober != nil),
		bucket: bucket{limit: cfg.Limit},
		stats: Stats{
			Flows:   make(map[Verdict]int),
			Deleted: make(map[Reason]uint64),
			Errors:  make(map[Op]uint64),
		},
		reported: make(map[flowKey]bool),
	}, nil
}

// Update gives the guard a new snapshot, which must not be changed any more.
// It never waits: several updates while a sweep is going on are one change to
// the next sweep. A snapshot that says nothing new changes nothing.
func (g *Guard) Update(s *Snapshot) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.know.update(s, g.policy.Load(), now) {
		g.condemned(now)
		g.learned()
	}
}

// condemned notes, with mu held, that there are news that can make flows stale.
func (g *Guard) condemned(now time.Time) {
	if g.news.IsZero() {
		g.news = now
	}
}

// learned is called, with mu held, after news that change verdicts.
func (g *Guard) learned() {
	g.policy.Store(g.know.policy())
	g.todo.change = true
	g.kick()
}

// kick wakes Run, unless it is going to wake anyway, to do what has been put
// into todo.
func (g *Guard) kick() {
	select {
	case g.kicks <- struct{}{}:
	default:
	}
}

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

// runner is what belongs to Run's goroutine.
type runner struct {
	*Guard
	schedule  schedule
	followers map[netip.AddrPort]*follower
	waiting   map[flowKey]counts // flows that waited for replies at the last sweep
	sub       Subscription
	subPorts  []uint16
	tasks     sync.WaitGroup
}

func (r *runner) stop() {
	if r.sub != nil {
		_ = r.sub.Close()
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
			r.tasks.Go(func() { f.follow(fctx, r.cfg.Prober, r.cfg.Resync, r.heard(at)) })
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
		}
	}
}

// heard makes the function that takes what a follower has found out.
func (g *Guard) heard(at netip.AddrPort) func(context.Context, bool) {
	return func(ctx context.Context, silent bool) {
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
}

// subscribe sees to it that new flows to the present ports are reported.
func (r *runner) subscribe(ctx context.Context, ports []uint16) {
	r.mu.Lock()
	if r.sub == r.broken {
		r.sub = nil
	}
	r.mu.Unlock()
	if r.cfg.Events == nil || len(ports) == 0 || r.sub != nil && slices.Equal(r.subPorts, ports) {
		return
	}
	sub, err := r.cfg.Events.Subscribe(ports)
	if err != nil {
		r.failed(OpSubscribe)
		return
	}
	// The two overlap, so that nothing is missed. What is reported twice is
	// deleted once.
	if r.sub != nil {
		_ = r.sub.Close()
	}
	r.sub, r.subPorts = sub, ports
	r.tasks.Go(func() { r.listen(ctx, sub) })
}

// listen judges new flows until the subscription ends.
func (g *Guard) listen(ctx context.Context, sub Subscription) {
	for {
		f, err := sub.Next()
		switch {
		case err == nil:
			g.created(ctx, f)
		case errors.Is(err, ErrEventsLost):
			g.mu.Lock()
			g.stats.EventsLost++
			g.todo.sweep = true
			g.mu.Unlock()
			g.kick()
		case errors.Is(err, net.ErrClosed):
			return
		default:
			_ = sub.Close()
			g.mu.Lock()
			g.broken = sub
			g.mu.Unlock()
			g.failed(OpEvents)
			return
		}
	}
}

// count counts an error.
func (g *Guard) count(op Op) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.Errors[op]++
}

// failed counts an error and has the next sweep come soon.
func (g *Guard) failed(op Op) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.Errors[op]++
	g.todo.retry = true
	g.kick()
}

// Stats tells what the guard has seen and done so far.
func (g *Guard) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.stats.clone()
	s.Silent = slices.SortedFunc(maps.Keys(g.know.silent), netip.AddrPort.Compare)
	s.Gone = len(g.know.tombstones)
	return s
}

// Flows reads the table and judges all flows to frontends, without deleting
// any. It works before and without [Guard.Run], after the first
// [Guard.Update].
func (g *Guard) Flows(ctx context.Context) ([]Finding, error) {
	p := g.policy.Load()
	if p == nil {
		return nil, nil
	}
	var fs []Finding
	translated := make(map[netip.AddrPort]bool)
	err := g.dump(ctx, p.Matches(), func() { fs = nil; clear(translated) }, func(f Flow) {
		front, _ := p.Frontend(f)
		fs = append(fs, Finding{Flow: f, Frontend: front})
		if p.translates(f) {
			translated[f.Orig.Dst] = true
		}
	})
	if err != nil {
		return nil, err
	}
	p = p.withTranslated(translated)
	for i := range fs {
		fs[i].Verdict, fs[i].Reason = p.Decide(fs[i].Flow)
	}
	fs = slices.DeleteFunc(fs, func(f Finding) bool { return f.Verdict == Foreign })
	slices.SortFunc(fs, func(a, b Finding) int {
		return cmp.Or(a.Flow.Orig.Dst.Compare(b.Flow.Orig.Dst), a.Flow.Orig.Src.Compare(b.Flow.Orig.Src))
	})
	return fs, nil
}
