package ctguard

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// mostKnown bounds each of the two halves of [known], together 1.4 MB. To
// delete so many flows one by one takes the kernel about 30 ms, as long as one
// walk over a table of 100,000 entries: with more, waiting for the sweep is no
// slower.
const mostKnown = 4096

// known remembers flows that were in order when they were last seen. When there
// is news that an endpoint is gone, those of them that lead there are deleted
// at once: the sweep, which finds the others, first has to wait for the
// kernel's walk over its whole table (0.25 µs for each entry, foreign or not),
// and for the sweep before it.
//
// The two halves are for the two kinds of flows there are: the few that last,
// which are those that need a guard, and the many that a client makes for one
// question each.
type known struct {
	streams []knownFlow // assured flows that the last sweep saw
	leftOut int         // of which so many more had no room
	young   []knownFlow // a ring of flows that events told of
	next    int         // where the ring goes on
}

// knownFlow is what it takes to judge and to delete a flow.
type knownFlow struct {
	orig, reply Tuple
	zone        uint16
	start       int64         // Flow.Start, in nanoseconds since 1970; 0: not known
	until       time.Duration // when it can have expired, since epoch; 0: an empty place
}

// epoch is an instant, for others to be counted from: half as large as a
// time.Time, and no more moved than that by whoever sets the clock.
var epoch = time.Now() //nolint:gochecknoglobals // never changed

func newKnownFlow(f Flow, now time.Time) knownFlow {
	k := knownFlow{orig: f.Orig, reply: f.Reply, zone: f.Zone, until: now.Sub(epoch) + f.Remaining}
	if !f.Start.IsZero() {
		k.start = f.Start.UnixNano()
	}
	return k
}

// flow is the flow as far as it is known.
func (k knownFlow) flow() Flow {
	f := Flow{Proto: unix.IPPROTO_UDP, Orig: k.orig, Reply: k.reply, Zone: k.zone}
	if k.start != 0 {
		f.Start = time.Unix(0, k.start)
	}
	return f
}

// made takes a flow that has just been made.
func (k *known) made(f Flow, now time.Time) {
	if len(k.young) < mostKnown {
		k.young = append(k.young, newKnownFlow(f, now))
		return
	}
	k.young[k.next] = newKnownFlow(f, now)
	k.next = (k.next + 1) % mostKnown
}

// swept takes what a sweep saw in place of what the sweep before did.
func (k *known) swept(streams []knownFlow, leftOut int) { k.streams, k.leftOut = streams, leftOut }

// size is how many flows are known.
func (k *known) size() int { return len(k.streams) + len(k.young) }

// condemn removes and returns the flows that are stale by p. Those that can have
// expired since they were seen are left to the sweep: their tuples may be in use
// again.
func (k *known) condemn(p *Policy, now time.Time) []Finding {
	var stale []Finding
	for _, half := range [][]knownFlow{k.streams, k.young} {
		for i, e := range half {
			if e.until < now.Sub(epoch) {
				continue
			}
			f := e.flow()
			if _, r := p.Decide(f); r.early() {
				front, _ := p.frontend(f)
				stale = append(stale, Finding{f, front, Stale, r})
				half[i] = knownFlow{}
			}
		}
	}
	return stale
}

// early tells whether a flow that was seen a while ago may be deleted for this
// reason: its endpoint does not answer any more, and so nobody is harmed if
// another flow with the same reply tuple has taken its place.
func (r Reason) early() bool {
	switch r {
	case EndpointGone, NotServing, NoEndpoints, TerminatingSilent:
		return true
	default:
		return false
	}
}

// early is the deletion of known flows.
type early struct {
	kicks chan struct{} // capacity 1: the policy differs

	mu   sync.Mutex // held while known flows are deleted
	done *Policy    // by which they were judged last
}

// hasten deletes known flows whenever there is news, until ctx ends.
func (g *Guard) hasten(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.early.kicks:
			g.purgeKnown(ctx)
		}
	}
}

// purgeKnown deletes those of the known flows that are stale by now. A sweep
// begins with it, so as not to find what is just being deleted.
func (g *Guard) purgeKnown(ctx context.Context) {
	g.early.mu.Lock()
	defer g.early.mu.Unlock()
	g.mu.Lock()
	p, now := g.policy.Load(), time.Now()
	if p == nil || p == g.early.done {
		g.mu.Unlock()
		return
	}
	g.early.done = p
	news := g.earlyNews
	g.earlyNews = time.Time{}
	stale := g.known.condemn(p, now)
	g.mu.Unlock()
	removed := g.purge(ctx, g.allow(stale, false), false)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.DeletedEarly += uint64(removed)
	if removed > 0 && !news.IsZero() {
		g.stats.NewsToPurge.observe(time.Since(news))
	}
}
