package cache

import (
	"sync"
	"time"
)

// shards is into how many parts the lock is spread. Capacity is not: the
// budget is one. 64 keep two of four readers from meeting 9 times of 10.
const (
	shards     = 64
	shardShift = 64 - 6
)

// segment is a part of the budget with a limit and an order of use of its own.
type segment uint8

const (
	probation segment = iota // positive answers, new or not in demand
	protected                // positive answers asked for at least twice after they came
	negative                 // NXDOMAIN and NODATA
	failures                 // RFC 9520; the only segment not in the table of answers
	segments
)

// shard is one part of the cache, under its own lock.
type shard struct {
	mu        sync.Mutex
	answers   table
	failed    table
	lists     [segments]list
	evictions [segments]uint64
	_         [64]byte // no two shards' locks in one cache line
}

// current returns the answer for the key, fresh or in its stale window, or nil.
// An answer past both is dropped.
func (s *shard) current(c *Cache, tag uint32, key []byte, now time.Duration) (n *node, fresh bool) {
	if n = s.answers.find(tag, key); n == nil {
		return nil, false
	}
	e := Entry{blob: n.blob}
	switch {
	case now < e.expires():
		return n, true
	case now < e.staleUntil():
		return n, false
	default:
		s.drop(c, n)
		return nil, false
	}
}

// failing returns the active failure for the key, or nil.
func (s *shard) failing(tag uint32, key []byte, now time.Duration) *node {
	n := s.failed.find(tag, key)
	if n != nil && now >= (Entry{blob: n.blob}).expires() {
		return nil
	}
	return n
}

// table returns the table that a segment's nodes are in.
func (s *shard) table(seg segment) *table {
	if seg == failures {
		return &s.failed
	}
	return &s.answers
}

// add enters a node whose key is new. It is accounted already in Cache.used,
// but for the table's growth.
func (s *shard) add(c *Cache, n *node) {
	s.lists[n.segment].push(n)
	c.segmentUsed[n.segment].Add(n.bytes())
	if grown := s.table(n.segment).insert(n); grown != 0 {
		c.used.Add(grown)
	}
}

// drop takes a node out for good.
func (s *shard) drop(c *Cache, n *node) {
	s.lists[n.segment].remove(n)
	c.segmentUsed[n.segment].Add(-n.bytes())
	c.used.Add(s.table(n.segment).remove(n) - n.bytes())
}

// replace gives a node a newer blob, accounted already in Cache.used, in seg,
// which is probation for all positive ones. To come again is a use: an answer
// with a short TTL may never be hit twice before it is asked for anew.
func (s *shard) replace(c *Cache, n *node, seg segment, blob string, size int) {
	if seg == probation && n.segment == protected {
		seg = protected
	}
	s.move(c, n, seg)
	c.used.Add(-n.bytes())
	c.segmentUsed[seg].Add(-n.bytes())
	n.setBlob(blob, size)
	c.segmentUsed[seg].Add(n.bytes())
	n.use &^= usedHit
	s.touch(c, n)
}

// move puts a node at the head of a segment, be it the one that it is in.
func (s *shard) move(c *Cache, n *node, to segment) {
	if n.segment == to && s.lists[to].newest == n {
		return
	}
	s.lists[n.segment].remove(n)
	if n.segment != to {
		c.segmentUsed[n.segment].Add(-n.bytes())
		c.segmentUsed[to].Add(n.bytes())
		n.segment = to
	}
	s.lists[to].push(n)
}

// touch counts one more use of an answer. The second promotes it; what then is
// too much for the protected segment goes back on probation.
func (s *shard) touch(c *Cache, n *node) {
	if n.use&usedOnce == 0 {
		n.use |= usedOnce
	} else {
		n.use |= usedTwice
	}
	if n.segment != probation || n.use&usedTwice == 0 {
		s.move(c, n, n.segment)
		return
	}
	s.move(c, n, protected)
	for c.segmentUsed[protected].Load() > c.limit(protected) && s.demote(c) {
	}
}

// demote puts the shard's least recently used protected answer back on
// probation, if there is one.
func (s *shard) demote(c *Cache) bool {
	n := s.lists[protected].oldest
	if n == nil {
		return false
	}
	n.use &^= usedOnce | usedTwice
	s.move(c, n, probation)
	return true
}
