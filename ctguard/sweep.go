package ctguard

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// dumpTries is how often an interrupted dump is begun in one sweep. A table
// that changes so fast is swept again soon.
const dumpTries = 3

// dump reads the flows of the matches, again from the beginning if it has to;
// then begin is called again.
func (g *Guard) dump(ctx context.Context, ms []Match, begin func(), fn func(Flow)) error {
	var err error
	for range dumpTries {
		begin()
		err = nil
		for f, ferr := range g.cfg.Table.Flows(ctx, ms) {
			if ferr != nil {
				err = ferr
				break
			}
			fn(f)
		}
		if !errors.Is(err, ErrInterrupted) {
			break
		}
	}
	return err
}

// survey is what a sweep, or its part for one address family, has seen and
// done.
type survey struct {
	flows      map[Verdict]int
	translated map[netip.AddrPort]bool
	waiting    map[flowKey]counts      // flows with unanswered queries
	unheard    map[netip.AddrPort]bool // endpoints of flows that never had a reply
	unknown    map[netip.AddrPort]bool // endpoints of flows, that are not known
	streams    []knownFlow             // assured flows that are in order
	leftOut    int                     // of which so many more had no room
	drain      bool                    // there are flows to be looked at again soon
	held       bool                    // some flow is held since it is not translated
	removed    int                     // flows deleted
	removedAt  time.Time               // the end of the last deletion

	// Of a part only:
	stale []Finding
	room  int // how many of these there may be: more are never deleted at once
	over  int // stale flows beyond
	pairs map[Match]*pair
	began time.Time
	took  time.Duration // to read
}

// pair counts the flows between a frontend and an endpoint.
type pair struct{ certain, others int }

func newSurvey() *survey {
	return &survey{
		flows:      make(map[Verdict]int),
		translated: make(map[netip.AddrPort]bool),
		waiting:    make(map[flowKey]counts),
		unheard:    make(map[netip.AddrPort]bool),
		unknown:    make(map[netip.AddrPort]bool),
		pairs:      make(map[Match]*pair),
	}
}

// merge adds a part.
func (s *survey) merge(part *survey) {
	for v, n := range part.flows {
		s.flows[v] += n
	}
	maps.Copy(s.translated, part.translated)
	maps.Copy(s.waiting, part.waiting)
	maps.Copy(s.unheard, part.unheard)
	room := min(mostKnown-len(s.streams), len(part.streams))
	s.streams = append(s.streams, part.streams[:room]...)
	s.leftOut += part.leftOut + len(part.streams) - room
	s.drain = s.drain || part.drain
	s.held = s.held || part.held
	s.removed += part.removed
	if part.removed > 0 {
		s.removedAt = part.removedAt
	}
}

// add judges a flow.
func (s *survey) add(p *Policy, f Flow) {
	v, r := p.Decide(f)
	if r == NotUDP || r == NoFrontend {
		return // there can be any number, and nothing is deleted there
	}
	m := Match{Dst: f.Orig.Dst, Src: f.Reply.Src}
	n := s.pairs[m]
	if n == nil {
		n = new(pair)
		s.pairs[m] = n
	}
	if r.certain() {
		n.certain++
	} else {
		n.others++
	}
	if v == Foreign {
		return
	}
	s.flows[v]++
	s.drain = s.drain || r == TerminatingBusy || r == Unanswered
	s.held = s.held || r == UntranslatedHeld
	if r == EndpointUnknown {
		s.unknown[f.Reply.Src] = true
	}
	if p.translates(f) {
		s.translated[f.Orig.Dst] = true
		s.remember(f, v)
	}
	if p.facts.Evidence {
		s.witness(p, f, r)
	}
	switch {
	case v != Stale:
	case len(s.stale) < s.room:
		front, _ := p.frontend(f)
		s.stale = append(s.stale, Finding{f, front, v, r})
	default:
		s.over++
	}
}

// reconsider judges the stale flows by the news that came while the table was
// read: an endpoint that has come back may have got some of them since. Flows
// that the news made stale are the next sweep's.
func (s *survey) reconsider(p *Policy) {
	all := s.stale
	s.stale = nil
	for _, f := range all {
		if f.Verdict, f.Reason = p.Decide(f.Flow); f.Verdict == Stale {
			s.stale = append(s.stale, f)
		}
	}
	s.over = 0     // unseen
	clear(s.pairs) // nor is any pair known any more to have stale flows only
}

// remember has a flow that lasts deleted at the news, should there be any.
func (s *survey) remember(f Flow, v Verdict) {
	switch {
	case v == Stale || !f.Assured:
	case len(s.streams) < mostKnown:
		s.streams = append(s.streams, newKnownFlow(f, s.began))
	default:
		s.leftOut++
	}
}

// sweep reads the table once, and deletes what is stale.
func (r *runner) sweep(ctx context.Context) {
	r.purgeKnown(ctx)
	began := time.Now()
	p, news := r.prepare(began)
	whole := newSurvey()
	if p != nil {
		// Before the table is read, so that no flow slips through between.
		r.subscribe(ctx, p.ports())
		// The kernel reads one family at a time, and can take its time. The
		// flows of the first should not wait for the second's.
		for _, ms := range r.toRead(p, byFamily(p.matches()), began) {
			part, err := r.sweepPart(ctx, p, ms)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				r.failed(OpDump)
				r.postpone(news)
				r.schedule.swept(began, time.Now(), false)
				return
			}
			whole.merge(part)
		}
	}
	ended := time.Now()
	r.schedule.swept(began, ended, whole.drain)
	r.accuse(whole)
	r.record(whole, ended.Sub(began), news, ended)
}

// sweepPart does what the matches reach.
func (r *runner) sweepPart(ctx context.Context, p *Policy, ms []Match) (*survey, error) {
	began := time.Now()
	r.untold(ms)
	var s *survey
	err := r.dump(ctx, ms, func() { s = newSurvey(); s.began, s.room = began, r.cfg.Limit.Burst }, func(f Flow) { s.add(p, f) })
	if err != nil {
		return nil, err
	}
	s.took = time.Since(began)
	r.walked(ms, p, began, s)
	r.noticeAll(s.unknown)
	if now := r.policy.Load(); now != p {
		s.reconsider(now)
	}
	s.removed = r.purgeSurvey(ctx, s)
	s.removedAt = time.Now()
	return s, nil
}

// noticeAll notes that flows lead to endpoints that are not known.
func (g *Guard) noticeAll(unknown map[netip.AddrPort]bool) {
	if len(unknown) == 0 {
		return
	}
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for at := range unknown {
		g.notice(at, now)
	}
}

// byFamily splits sorted matches.
func byFamily(ms []Match) [][]Match {
	six := slices.IndexFunc(ms, func(m Match) bool { return m.Dst.Addr().Is6() })
	if six <= 0 {
		return [][]Match{ms}
	}
	return [][]Match{ms[:six], ms[six:]}
}

// prepare brings the policy up to date. It takes the news that the sweep is
// going to deal with.
func (r *runner) prepare(now time.Time) (*Policy, time.Time) {
	timeouts, ipvs := r.askHost()
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.know
	if k.expire(now) || timeouts != k.timeouts || !maps.Equal(ipvs, k.ipvs) {
		k.timeouts, k.ipvs = timeouts, ipvs
		r.policy.Store(k.policy())
	}
	news := r.news
	r.news = time.Time{}
	return r.policy.Load(), news
}

// postpone leaves news to the next sweep.
func (r *runner) postpone(news time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !news.IsZero() {
		r.news = news
	}
}

// askHost reads the timeouts and the virtual servers of IPVS.
func (r *runner) askHost() (Timeouts, map[netip.AddrPort]bool) {
	if r.cfg.Host == nil {
		return DefaultTimeouts(), nil
	}
	// Without an answer the guard goes on with the last there was, or what is
	// likely: it is asked again with the next sweep.
	r.mu.Lock()
	t, ipvs := r.know.timeouts, r.know.ipvs
	r.mu.Unlock()
	if now, err := r.cfg.Host.Timeouts(); err == nil {
		t = now
	} else {
		r.count(OpHost)
	}
	servers, err := r.cfg.Host.VirtualServers()
	if err != nil {
		r.count(OpHost)
		return t, ipvs
	}
	ipvs = make(map[netip.AddrPort]bool, len(servers))
	for _, s := range servers {
		ipvs[s] = true
	}
	return t, ipvs
}

// record enters a complete sweep into the statistics, and learns from it.
func (r *runner) record(s *survey, took time.Duration, news, now time.Time) {
	r.mu.Lock()
	k, st := r.know, &r.stats
	if r.policy.Load() != nil {
		// What neither this sweep nor an event since the one before has
		// reported is gone.
		maps.DeleteFunc(r.reported, func(_ flowKey, at uint64) bool { return at < st.Sweeps })
		st.Flows = s.flows
		st.Sweeps++
		st.LastSweep = now
		st.SweepDuration.observe(took)
		if s.removed > 0 && !news.IsZero() {
			st.NewsToPurge.observe(s.removedAt.Sub(news))
		}
	}
	r.known.swept(s.streams, s.leftOut)
	r.seen = r.seen || len(s.flows) > 0
	r.held = s.held
	for at := range s.translated {
		r.translated(at)
	}
	state := k.state(r.policy.Load(), r.seen)
	differs := state != st.State
	st.State = state
	r.mu.Unlock()
	if differs && r.cfg.OnState != nil {
		r.callbacks.Lock()
		defer r.callbacks.Unlock()
		r.cfg.OnState(state)
	}
}

// translated notes, with mu held, that flows to a frontend are translated on
// this node: the evidence that was wanting against those that are not.
func (g *Guard) translated(at netip.AddrPort) {
	if !set(g.know.translated, at, true) {
		return
	}
	g.policy.Store(g.know.policy())
	if g.held {
		g.todo.sweep = true
		g.kick()
	}
}
