package resolver

import (
	"sync/atomic"
	"time"
)

// Transport is how a query came in.
type Transport uint8

// The transports.
const (
	UDP Transport = iota
	TCP
	numTransports
)

// String returns the transport's name, as in metrics.
func (t Transport) String() string {
	if t == TCP {
		return "tcp"
	}
	return "udp"
}

// Shed says why a query was answered SERVFAIL, or a connection closed, without
// being worked on.
type Shed uint8

// The reasons.
const (
	ShedInFlight Shed = iota // Limits.InFlight reached
	ShedClient               // Limits.InFlightPerClient reached, under pressure
	ShedWaiters              // too many clients waiting in all
	ShedConns                // Limits.Conns reached
	ShedConnsPer             // Limits.ConnsPerClient reached
	ShedOutput               // TCP clients do not take their answers
	NumShed
)

// String returns the reason's name, as in metrics.
func (s Shed) String() string {
	return [...]string{"in_flight", "client", "waiters", "tcp_connections", "tcp_client", "tcp_output"}[s]
}

// Hit says what kind of cached answer served a query.
type Hit uint8

// The kinds of hits.
const (
	HitPositive Hit = iota
	HitNegative
	HitFailure
	HitStale
	NumHits
)

// String returns the kind's name, as in metrics.
func (h Hit) String() string {
	return [...]string{"positive", "negative", "failure", "stale"}[h]
}

// NumRcodes bounds the rcodes that are counted one by one: those of the header
// (RFC 1035) and BADVERS.
const NumRcodes = 17

// durationBounds are the upper bounds of the histogram of answer times. Hits
// lie below 250 us; the bounds at 1.2, 1.5 and 1.8 s are the stale timer, the
// total deadline and the promise.
var durationBounds = [...]time.Duration{ //nolint:gochecknoglobals // a constant table
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
	500 * time.Millisecond, 800 * time.Millisecond, 1200 * time.Millisecond, 1500 * time.Millisecond, 1800 * time.Millisecond,
}

// counters are what one goroutine, or one family of goroutines, counts. Readers
// have their own, so that a hit contends with nobody; Stats sums them.
type counters struct {
	queries    [numTransports]atomic.Uint64
	dropped    atomic.Uint64
	responses  [NumRcodes]atomic.Uint64
	hits       [NumHits]atomic.Uint64
	misses     atomic.Uint64
	prefetches atomic.Uint64
	saved      atomic.Uint64
	shed       [NumShed]atomic.Uint64
	sendErrors atomic.Uint64
	buckets    [len(durationBounds) + 1]atomic.Uint64
	nanos      atomic.Uint64
	_          [64]byte // no false sharing with the next reader's
}

// response counts an answer.
func (c *counters) response(rcode uint16) {
	c.responses[min(rcode, NumRcodes-1)].Add(1)
}

// tally is what a goroutine has counted of the queries that it answered, but not
// published yet. An addition that others may see costs as much as the whole
// patching of an answer's header; a batch makes a few of them, not three a query.
type tally struct {
	queries   [numTransports]uint64
	hits      [NumHits]uint64
	responses [NumRcodes]uint64
}

// response counts an answer.
func (t *tally) response(rcode uint16) { t.responses[min(rcode, NumRcodes-1)]++ }

// publish adds what was counted to the counters. A reader does it before its
// answers leave: who has an answer finds it counted.
func (s *scratch) publish() {
	move(s.c.queries[:], s.queries[:])
	move(s.c.hits[:], s.hits[:])
	move(s.c.responses[:], s.responses[:])
}

func move(to []atomic.Uint64, from []uint64) {
	for i, n := range from {
		if n > 0 {
			to[i].Add(n)
			from[i] = 0
		}
	}
}

// duration counts n answers that took d each.
func (c *counters) duration(d time.Duration, n uint64) {
	i := 0
	for i < len(durationBounds) && d > durationBounds[i] {
		i++
	}
	c.buckets[i].Add(n)
	c.nanos.Add(uint64(max(d, 0)) * n)
}

// Histogram is a histogram of durations.
type Histogram struct {
	Bounds []time.Duration // upper bounds, ascending
	Counts []uint64        // one more than Bounds: the last is above all
	Sum    time.Duration
}

// SocketDrops is how many datagrams the kernel dropped because the receive
// buffers of an address were full.
type SocketDrops struct {
	Address string
	Drops   uint64
}

// Stats are the resolver's counters since it was made, and its current state.
type Stats struct {
	Queries    [numTransports]uint64 // by Transport
	Dropped    uint64                // datagrams and frames that deserved no answer
	Responses  [NumRcodes]uint64     // by rcode
	Hits       [NumHits]uint64       // by Hit
	Misses     uint64
	Prefetches uint64
	Shed       [NumShed]uint64 // by Shed
	SendErrors uint64          // answers that the kernel would not take
	Duration   Histogram
	Drops      []SocketDrops
	Stuck      uint64                               // sockets closed because their goroutine stood still
	Walks      [NumWalkKinds][NumWalkResults]uint64 // search-list walks
	Saved      uint64                               // questions that answers to walks spared clients
	InFlight   int                                  // flights
	Waiters    int                                  // clients waiting on them
	Conns      int                                  // TCP connections
}

func (s *Stats) add(c *counters) {
	for i := range c.queries {
		s.Queries[i] += c.queries[i].Load()
	}
	s.Dropped += c.dropped.Load()
	for i := range c.responses {
		s.Responses[i] += c.responses[i].Load()
	}
	for i := range c.hits {
		s.Hits[i] += c.hits[i].Load()
	}
	s.Misses += c.misses.Load()
	s.Prefetches += c.prefetches.Load()
	s.Saved += c.saved.Load()
	for i := range c.shed {
		s.Shed[i] += c.shed[i].Load()
	}
	s.SendErrors += c.sendErrors.Load()
	for i := range c.buckets {
		s.Duration.Counts[i] += c.buckets[i].Load()
	}
	s.Duration.Sum += time.Duration(c.nanos.Load()) //nolint:gosec // 292 years
}
