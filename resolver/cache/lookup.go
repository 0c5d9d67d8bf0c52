package cache

import "time"

// Lookup finds what the question with this key is to be answered with. The
// Entry is zero for Miss and Failed.
func (c *Cache) Lookup(key []byte, now time.Duration) (Entry, Kind) {
	i, tag := c.hash(key)
	s := &c.shards[i]
	s.mu.Lock()
	n, kind := s.lookup(c, tag, key, now)
	e := Entry{}
	if n != nil {
		e = Entry{blob: n.blob, hit: n.use&usedHit != 0}
		n.use |= usedHit
		s.touch(c, n)
	}
	s.mu.Unlock()
	return e, kind
}

// Peek is Lookup for observers: it does not count as use.
func (c *Cache) Peek(key []byte, now time.Duration) (Entry, Kind) {
	i, tag := c.hash(key)
	s := &c.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	n, kind := s.lookup(c, tag, key, now)
	if n == nil {
		return Entry{}, kind
	}
	return Entry{blob: n.blob, hit: n.use&usedHit != 0}, kind
}

// lookup decides between answer and failure: the order is in the package
// comment. It returns no node for Miss and Failed.
func (s *shard) lookup(c *Cache, tag uint32, key []byte, now time.Duration) (*node, Kind) {
	n, fresh := s.current(c, tag, key, now)
	switch {
	case fresh:
		return n, Entry{blob: n.blob}.Kind()
	case s.failing(tag, key, now) == nil:
		return nil, Miss
	case n != nil:
		return n, Stale
	default:
		return nil, Failed
	}
}

// Stale returns the answer that has expired but may still stand in for one
// that cannot be had or does not come in time (RFC 8767 section 5). The reply
// is to be marked with ReplyOptions.Stale.
func (c *Cache) Stale(key []byte, now time.Duration) (Entry, bool) {
	i, tag := c.hash(key)
	s := &c.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	n, fresh := s.current(c, tag, key, now)
	if n == nil || fresh {
		return Entry{}, false
	}
	// Worth keeping; the use is counted when the answer comes that this one
	// stands in for.
	s.move(c, n, n.segment)
	return Entry{blob: n.blob}, true
}
