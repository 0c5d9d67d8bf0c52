package ctguard

import (
	"cmp"
	"context"
	"errors"
	"maps"
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
	// are moved when idle, and none is believed dead; an endpoint that no snapshot
	// has had is gone like one that has left, unless [Guard.Doubt] says otherwise.
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
	// nf_conntrack_acct or an nft rule with "ct packets" turns on. It does
	// nothing without a Prober.
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
	early  early

	callbacks sync.Mutex // held while OnPurge or OnState runs

	mu    sync.Mutex // guards what follows
	know  *knowledge
	seen  bool      // some flow to a frontend has been seen
	held  bool      // some flow was held since it is not translated
	todo  todo      // what Run has been kicked for
	news  time.Time // the oldest news that no sweep has dealt with, or zero
	known known
	told  [2]bool // events have told of flows, by family

	// earlyNews is the oldest news for which known flows have not been deleted
	// yet, or zero.
	earlyNews time.Time

	answered map[netip.AddrPort]bool // endpoints that serve and have answered probes

	strangers strangers

	bucket   bucket
	stats    Stats
	reported map[flowKey]uint64 // what a dry run has reported, by the last sweep that saw it
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
		cfg.Limit = DefaultLimit()
	}
	return &Guard{
		cfg:    cfg,
		kicks:  make(chan struct{}, 1),
		early:  early{kicks: make(chan struct{}, 1)},
		know:   newKnowledge(cfg.Zones, cfg.Evidence && cfg.Prober != nil),
		bucket: bucket{limit: cfg.Limit},
		stats: Stats{
			Flows:   make(map[Verdict]int),
			Deleted: make(map[Reason]uint64),
			Errors:  make(map[Op]uint64),
		},
		answered: make(map[netip.AddrPort]bool),
		strangers: strangers{
			kicks: make(chan struct{}, 1),
			all:   make(map[netip.AddrPort]*stranger),
		},
		reported: make(map[flowKey]uint64),
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

// Recall has the guard know the endpoints that another has known, which it
// replaces. It is called before the first [Guard.Update], by whose snapshot those
// that are not in it have left.
func (g *Guard) Recall(before *Guard) {
	now := time.Now()
	before.mu.Lock()
	met := maps.Clone(before.know.met)
	before.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	for at, left := range met {
		if left.IsZero() {
			left = now
		}
		g.know.met[at] = left
	}
}

// Doubt tells the guard that its snapshots may be old, as while the API server is
// out of reach, or that they are not any more. kube-proxy may then know endpoints
// that no snapshot has: flows to such are left alone, unless probes show that they
// are dead.
func (g *Guard) Doubt(is bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.know.doubt != is {
		g.know.doubt = is
		g.learned()
	}
}

// condemned notes, with mu held, that there are news that can make flows stale.
func (g *Guard) condemned(now time.Time) {
	if g.news.IsZero() {
		g.news = now
	}
	if g.earlyNews.IsZero() {
		g.earlyNews = now
	}
}

// learned is called, with mu held, after news that change verdicts.
func (g *Guard) learned() {
	g.policy.Store(g.know.policy())
	g.todo.change = true
	g.kick()
	select {
	case g.early.kicks <- struct{}{}:
	default:
	}
}

// kick wakes Run, unless it is going to wake anyway, to do what has been put
// into todo.
func (g *Guard) kick() {
	select {
	case g.kicks <- struct{}{}:
	default:
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
	s.Known, s.KnownLeftOut = g.known.size(), g.known.leftOut
	return s
}

// Flows reads the table and judges all flows to frontends, without deleting
// any. It works before and without [Guard.Run], after the first
// [Guard.Update]; without, nothing is probed, and endpoints that the snapshot does
// not have are gone.
func (g *Guard) Flows(ctx context.Context) ([]Finding, error) {
	p := g.policy.Load()
	if p == nil {
		return nil, nil
	}
	var fs []Finding
	translated := make(map[netip.AddrPort]bool)
	err := g.dump(ctx, p.matches(), func() { fs = nil; clear(translated) }, func(f Flow) {
		front, _ := p.frontend(f)
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
