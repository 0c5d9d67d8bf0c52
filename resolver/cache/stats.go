package cache

// Stats is what the cache holds and has had to let go. Hits and misses are the
// resolver's to count: it knows a client's query from its own look-ups.
type Stats struct {
	Size  int64 // the budget, bytes
	Bytes int64 // taken of it, tables included

	Probation SegmentStats // positive answers that are new or not in demand
	Protected SegmentStats // positive answers in demand
	Negative  SegmentStats // NXDOMAIN and NODATA
	Failures  SegmentStats // RFC 9520; no answers
}

// SegmentStats is one segment's part.
type SegmentStats struct {
	Entries   int    // fresh and expired
	Bytes     int64  // of entries alone
	Evictions uint64 // since the start, for want of room
}

// Entries returns the number of answers, fresh and expired.
func (s *Stats) Entries() int {
	return s.Probation.Entries + s.Protected.Entries + s.Negative.Entries
}

// Evictions returns how often something was dropped for want of room.
func (s *Stats) Evictions() uint64 {
	return s.Probation.Evictions + s.Protected.Evictions + s.Negative.Evictions + s.Failures.Evictions
}

// Stats counts. It takes each shard's lock in turn: call it for a scrape, not
// for a query.
func (c *Cache) Stats() Stats {
	st := Stats{Size: c.size.Load(), Bytes: c.used.Load()}
	parts := [segments]*SegmentStats{
		probation: &st.Probation, protected: &st.Protected, negative: &st.Negative, failures: &st.Failures,
	}
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for seg, part := range parts {
			part.Entries += s.lists[seg].n
			part.Evictions += s.evictions[seg]
		}
		s.mu.Unlock()
	}
	for seg, part := range parts {
		part.Bytes = c.segmentUsed[seg].Load()
	}
	return st
}
