package upstream

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Wrong is a way in which a message is not the answer that is waited for. Such
// messages never end a wait.
type Wrong uint8

// The ways.
const (
	WrongID       Wrong = iota // nobody asked under this id
	WrongQuestion              // something else was asked under this id
	WrongMessage               // not a well-formed answer

	numWrongs
)

// String returns the way in the form of a metric's label.
func (w Wrong) String() string { return [numWrongs]string{"id", "question", "message"}[w] }

// Stats is what a Forwarder has done since New.
type Stats struct {
	Paths []PathStats // ordered by server and transport
	// Denied counts, by Kind, the second questions that a budget refused.
	Denied [numKinds]uint64
}

// PathStats is about one server over one transport. That of a server which no
// route names any more is gone.
type PathStats struct {
	Server    netip.AddrPort
	Transport Transport

	Up   bool          // false: not asked but to see whether it works again
	RTT  time.Duration // smoothed; 0 before the first answer
	EDNS bool          // questions carry OPT records

	Queries   uint64 // all that were sent, of which:
	Hedges    uint64
	Retries   uint64
	Resends   uint64 // of questions that nobody received
	Probes    uint64
	Fallbacks uint64 // for the whole of a truncated answer, over TCP

	Failures [numReasons]uint64 // of single queries, by Reason
	Wrong    [numWrongs]uint64  // messages, by Wrong
	Late     uint64             // answers for which nobody waited any more
	Latency  Histogram          // of answers of every kind

	InFlight int
	Sockets  int
	Opened   uint64 // sockets, ever
}

// counters are what a path counts, guarded by server.mu.
type counters struct {
	queries   [numAttemptKinds]uint64
	fallbacks uint64
	failures  [numReasons]uint64
	wrong     [numWrongs]uint64
	late      uint64
	latency   Histogram
	opened    uint64
}

// numBounds is the number of a histogram's bounds.
const numBounds = 13

// LatencyBounds returns the upper bounds of a Histogram's buckets, the last of
// which has none.
func LatencyBounds() [numBounds]time.Duration {
	const us, ms = time.Microsecond, time.Millisecond
	return [numBounds]time.Duration{
		200 * us, 500 * us, ms, 2 * ms, 5 * ms, 10 * ms, 20 * ms, 50 * ms,
		100 * ms, 200 * ms, 500 * ms, 1000 * ms, 1500 * ms,
	}
}

// Histogram counts durations.
type Histogram struct {
	Buckets [numBounds + 1]uint64 // not cumulative
	Sum     time.Duration
}

func (h *Histogram) add(d time.Duration) {
	bounds := LatencyBounds()
	i := 0
	for i < len(bounds) && d > bounds[i] {
		i++
	}
	h.Buckets[i]++
	h.Sum += d
}

// Stats returns the present counts.
func (f *Forwarder) Stats() Stats {
	f.mu.Lock()
	servers := slices.Collect(maps.Values(f.servers))
	f.mu.Unlock()
	slices.SortFunc(servers, func(a, b *server) int {
		return a.addr.Compare(b.addr)
	})
	var st Stats
	for _, s := range servers {
		st.Paths = append(st.Paths, s.pathStats(UDP), s.pathStats(TCP))
	}
	for _, r := range f.all {
		for k, n := range r.budget.refused() {
			st.Denied[k] += n
		}
	}
	return st
}

func (s *server) pathStats(t Transport) PathStats {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	st := PathStats{
		Server: s.addr, Transport: t, Up: !p.down.Load(), RTT: p.srtt, EDNS: s.f.now() >= s.edns.off,
		Hedges: p.queries[hedged], Retries: p.queries[retried], Resends: p.queries[resent], Probes: p.queries[probed],
		Fallbacks: p.fallbacks, Failures: p.failures, Wrong: p.wrong, Late: p.late, Latency: p.latency,
		Sockets: len(s.pools[t].conns), Opened: p.opened,
	}
	for _, n := range p.queries {
		st.Queries += n
	}
	for _, c := range s.pools[t].conns {
		st.InFlight += c.live
	}
	return st
}
