package ctguard

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Op is an operation that can fail.
type Op string

// The operations.
const (
	OpDump      Op = "dump"
	OpDelete    Op = "delete"
	OpSubscribe Op = "subscribe"
	OpEvents    Op = "events"
	OpHost      Op = "host"
)

// Ops are all operations.
func Ops() []Op { return []Op{OpDump, OpDelete, OpSubscribe, OpEvents, OpHost} }

// Stats is what the guard has seen and done. Counters start with the guard.
type Stats struct {
	State State

	// Flows counts the flows that the last sweep saw, before it deleted any.
	Flows map[Verdict]int

	// Deleted counts deleted flows. What a dry run would have deleted, and
	// what had gone before it could be, is not in it.
	Deleted map[Reason]uint64

	// DeletedEarly counts those of them that were known and were deleted at the
	// news, before the table was read.
	DeletedEarly uint64

	// Recreated counts stale flows that appeared after the guard had the news
	// that made them stale: what rules that lag behind have made.
	Recreated uint64

	// Refused counts deletions that the rate limit has put off.
	Refused uint64

	// Errors counts failed operations.
	Errors map[Op]uint64

	// EventsLost counts how often the kernel had no room for events.
	EventsLost uint64

	// Sweeps and LastSweep tell of complete sweeps.
	Sweeps    uint64
	LastSweep time.Time

	// SweepDuration has each complete sweep.
	SweepDuration Histogram

	// NewsToPurge has the time from a piece of news (a snapshot that differs,
	// or the silence of an endpoint that terminates) to the end of the
	// deletions of known flows, and to that of the first sweep after it: of
	// each if it deleted anything.
	NewsToPurge Histogram

	// Silent are the endpoints that are believed dead, since they used to
	// answer probes and do not now.
	Silent []netip.AddrPort

	// Gone counts the frontends that have vanished not long ago.
	Gone int

	// Known counts the flows that are remembered between sweeps, to be deleted
	// at once when there is news; KnownLeftOut, those that the last sweep saw
	// and for which there was no room.
	Known, KnownLeftOut int
}

// Histogram is a distribution of durations.
type Histogram struct {
	// Bounds are the upper bounds of all buckets but the last, which has
	// none. They are shared: do not change them.
	Bounds []time.Duration

	// Counts has one element more than Bounds, and is not cumulative.
	Counts []uint64

	Sum time.Duration
}

// durationBounds lie around the 100 ms within which a purge has to follow the
// news, and reach from a sweep of a small table to kube-proxy's lag.
func durationBounds() []time.Duration {
	return []time.Duration{
		time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
		25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
		500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second,
	}
}

// Count is the number of observations.
func (h Histogram) Count() uint64 {
	var n uint64
	for _, c := range h.Counts {
		n += c
	}
	return n
}

func (h *Histogram) observe(d time.Duration) {
	if h.Counts == nil {
		h.Bounds = durationBounds()
		h.Counts = make([]uint64, len(h.Bounds)+1)
	}
	i, _ := slices.BinarySearch(h.Bounds, d)
	h.Counts[i]++
	h.Sum += d
}

func (h Histogram) clone() Histogram {
	h.Counts = slices.Clone(h.Counts)
	return h
}

func (s *Stats) clone() Stats {
	c := *s
	c.Flows = maps.Clone(s.Flows)
	c.Deleted = maps.Clone(s.Deleted)
	c.Errors = maps.Clone(s.Errors)
	c.SweepDuration = s.SweepDuration.clone()
	c.NewsToPurge = s.NewsToPurge.clone()
	return c
}
