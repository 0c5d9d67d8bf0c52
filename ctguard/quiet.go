package ctguard

import (
	"net/netip"
	"time"
)

// quietFor is how long an address family may go unread for want of flows. A walk
// that has to find what no event told of (events switched off for a while, or
// masked by somebody's rules) comes after so long at the latest, if no change of
// the cluster brings it before.
const quietFor = 2 * time.Minute

// quiet is what is known of a family without reading the table. Where a Service
// has addresses of both, pods are given one as their nameserver, as a rule: no flow
// leads to the other, and the kernel's walk over its whole table for that, which is
// half of what a sweep costs, finds nothing. With the events of new flows nobody has
// to look again to know.
type quiet struct {
	since    time.Time // the beginning of the last walk, if that found none; else zero
	policy   *Policy   // by which it was judged
	listener *listener // that was there before, and has reported none since
}

// familyIndex tells the families apart.
func familyIndex(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

// toRead returns the parts of a sweep that are to be read: without the family that
// is quiet, while the other is not. Of a table where both are, nothing is known that
// would make up for what is not read.
func (r *runner) toRead(p *Policy, parts [][]Match, now time.Time) [][]Match {
	if len(parts) < 2 {
		return parts
	}
	var read [][]Match
	for _, ms := range parts {
		if !r.isQuiet(p, familyIndex(ms[0].Dst.Addr()), now) {
			read = append(read, ms)
		}
	}
	if len(read) == 0 {
		return parts
	}
	return read
}

// isQuiet tells whether a family had no flow to a frontend, by the same policy, and
// could have got none since without an event.
func (r *runner) isQuiet(p *Policy, i int, now time.Time) bool {
	q, l := r.quiet[i], r.events
	r.mu.Lock()
	told := r.told[i]
	r.mu.Unlock()
	return !q.since.IsZero() && now.Sub(q.since) < quietFor && !told &&
		q.policy == p && q.listener == l && l != nil && !l.broken.Load()
}

// untold begins a walk for some matches: only events from now on tell of flows that
// it may miss.
func (r *runner) untold(ms []Match) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range ms {
		i := familyIndex(m.Dst.Addr())
		r.quiet[i], r.told[i] = quiet{}, false
	}
}

// walked notes, after untold, what a walk with policy p has found.
func (r *runner) walked(ms []Match, p *Policy, began time.Time, s *survey) {
	if len(s.flows) > 0 {
		return
	}
	for _, m := range ms {
		r.quiet[familyIndex(m.Dst.Addr())] = quiet{since: began, policy: p, listener: r.events}
	}
}
