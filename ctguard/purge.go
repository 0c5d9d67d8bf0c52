package ctguard

import (
	"context"
	"errors"
	"slices"
	"time"
)

// deleteCost is about what it costs to delete one flow by its tuple. Beyond
// so many flows, one walk of the kernel over its table is cheaper.
const deleteCost = 7 * time.Microsecond

// purgeSurvey deletes the stale flows of a survey and returns how many it
// removed.
func (r *runner) purgeSurvey(ctx context.Context, s *survey) int {
	stale := r.allow(s.stale, false)
	if !r.cfg.DryRun {
		r.refuse(s.over)
	}
	removed := 0
	if len(stale) == len(s.stale) && s.over == 0 {
		stale, removed = r.purgePairs(ctx, s)
	}
	return removed + r.purge(ctx, stale, false)
}

// purgePairs deletes the flows of such pairs of a frontend and an endpoint as
// have only certainly stale flows, and many of them, with one message each. It
// returns the stale flows of all other pairs.
func (r *runner) purgePairs(ctx context.Context, s *survey) (rest []Finding, removed int) {
	many := make(map[Match][]Finding)
	for _, f := range s.stale {
		m := Match{Dst: f.Flow.Orig.Dst, Src: f.Flow.Reply.Src}
		if n := s.pairs[m]; n != nil && n.others == 0 && time.Duration(n.certain)*deleteCost > s.took {
			many[m] = append(many[m], f)
		} else {
			rest = append(rest, f)
		}
	}
	for m, fs := range many {
		err := r.cfg.Table.DeleteMatching(ctx, m)
		if err != nil {
			if !errors.Is(err, ErrNotSupported) {
				r.failed(OpDelete)
			}
			rest = append(rest, fs...)
			continue
		}
		removed += len(fs)
		r.purged(fs, false)
	}
	return rest, removed
}

// purge deletes flows one by one and returns how many it removed. It takes them
// in portions: what it needs besides is as large as they are.
func (g *Guard) purge(ctx context.Context, found []Finding, event bool) (removed int) {
	for part := range slices.Chunk(found, mostKnown) {
		removed += g.purgePart(ctx, part, event)
	}
	return removed
}

func (g *Guard) purgePart(ctx context.Context, found []Finding, event bool) int {
	flows := make([]Flow, len(found))
	for i, f := range found {
		flows[i] = f.Flow
	}
	removed, err := g.cfg.Table.Delete(ctx, flows)
	if err != nil && ctx.Err() == nil {
		g.failed(OpDelete)
	}
	var done []Finding
	for i, f := range found {
		if i < len(removed) && removed[i] {
			done = append(done, f)
		}
	}
	g.purged(done, event)
	return len(done)
}

// created judges a flow that has just been made.
func (g *Guard) created(ctx context.Context, f Flow) {
	// Judged and remembered under one lock, so that news come before both or
	// after both.
	g.mu.Lock()
	p, now := g.policy.Load(), time.Now()
	if p == nil {
		g.mu.Unlock()
		return
	}
	v, r := p.Decide(f)
	if v == Foreign {
		g.mu.Unlock()
		return
	}
	g.seen = true
	g.told[familyIndex(f.Orig.Dst.Addr())] = true
	g.held = g.held || r == UntranslatedHeld
	if r == EndpointUnknown {
		g.notice(f.Reply.Src, now)
	}
	if p.translates(f) {
		g.translated(f.Orig.Dst)
	}
	// Rules that send flows to an endpoint that is ready do not lag.
	if v == Stale && r != Unanswered {
		g.stats.Recreated++
	}
	if v != Stale && p.translates(f) {
		g.known.made(f, now)
	}
	if r == FrontendGone && g.know.refute(f.Orig.Dst, now) {
		g.policy.Store(g.know.policy())
	}
	g.mu.Unlock()

	// Two reasons are left to the sweeps, so that an error would cost a few
	// replies and not all: a vanished frontend may only have changed hands,
	// and an endpoint believed dead may be alive again.
	if v != Stale || r == FrontendGone || r == Unanswered {
		return
	}
	front, _ := p.frontend(f)
	g.purge(ctx, g.allow([]Finding{{f, front, v, r}}, true), true)
}

// allow returns those of the findings that may be deleted: none in a dry run,
// which it reports instead, else as many as the limit lets.
func (g *Guard) allow(found []Finding, event bool) []Finding {
	if g.cfg.DryRun {
		g.rehearse(found, event)
		return nil
	}
	g.mu.Lock()
	n := g.bucket.take(len(found), time.Now())
	g.mu.Unlock()
	g.refuse(len(found) - n)
	return found[:n]
}

// refuse notes that so many stale flows are left to the next sweep.
func (g *Guard) refuse(n int) {
	if n == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.Refused += uint64(n)
	g.todo.retry = true
	g.kick()
}

// rehearse reports what would be deleted, each flow once.
func (g *Guard) rehearse(found []Finding, event bool) {
	var fresh []Finding
	g.mu.Lock()
	for _, f := range found {
		k := keyOf(f.Flow)
		if _, known := g.reported[k]; !known {
			fresh = append(fresh, f)
		}
		g.reported[k] = g.stats.Sweeps
	}
	g.mu.Unlock()
	g.report(fresh, Purge{Event: event, DryRun: true})
}

// purged records deletions.
func (g *Guard) purged(done []Finding, event bool) {
	g.mu.Lock()
	for _, f := range done {
		g.stats.Deleted[f.Reason]++
	}
	g.mu.Unlock()
	g.report(done, Purge{Event: event})
}

// report tells OnPurge of findings.
func (g *Guard) report(fs []Finding, p Purge) {
	if g.cfg.OnPurge == nil {
		return
	}
	g.callbacks.Lock()
	defer g.callbacks.Unlock()
	for _, f := range fs {
		p.Finding = f
		g.cfg.OnPurge(p)
	}
}
