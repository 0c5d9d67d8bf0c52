package cache

import (
	"fmt"
	"hash/maphash"
	"sync/atomic"
	"time"
	"unsafe"
)

// Config is what New and Reconfigure take.
type Config struct {
	Size  int64  // memory for everything cached, in bytes; at least MinSize
	Zones []Zone // one for each name at least: "." must be among them
}

// MinSize is the smallest Config.Size. It holds about 1,500 answers of one
// address, and any single one up to 32 KiB.
const MinSize = 256 << 10

// largest is the part of the budget that a single answer may take.
const largest = 8

// Cache is safe for use by several goroutines. It has none of its own, and
// needs no closing.
type Cache struct {
	base  time.Time
	seed  maphash.Seed
	zones atomic.Pointer[zones]
	size  atomic.Int64

	used        atomic.Int64           // bytes: of all segments, and the tables
	segmentUsed [segments]atomic.Int64 // bytes
	shards      [shards]shard
}

// fixedBytes is what an empty cache takes.
const fixedBytes = int64(unsafe.Sizeof(Cache{}))

// New returns an empty cache. Its clock starts now.
func New(cfg Config) (*Cache, error) {
	c := &Cache{base: time.Now(), seed: maphash.MakeSeed()}
	c.used.Store(fixedBytes)
	if err := c.Reconfigure(cfg); err != nil {
		return nil, err
	}
	return c, nil
}

// Reconfigure changes the configuration, or nothing if there is an error. A
// smaller size evicts at once; caps apply to answers that come from now on.
func (c *Cache) Reconfigure(cfg Config) error {
	if cfg.Size < MinSize {
		return fmt.Errorf("cache size %d: less than %d bytes", cfg.Size, MinSize)
	}
	z, err := newZones(cfg.Zones)
	if err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	c.zones.Store(&z)
	c.size.Store(cfg.Size)
	// Round and round, so that no shard loses more than the others.
	for i := 0; c.segmentUsed[protected].Load() > c.limit(protected); i++ {
		s := &c.shards[i%shards]
		s.mu.Lock()
		s.demote(c)
		s.mu.Unlock()
	}
	for _, seg := range []segment{negative, failures} {
		for i := 0; c.segmentUsed[seg].Load() > c.limit(seg) && c.evict(seg, i); i++ {
		}
	}
	for i := 0; c.used.Load() > cfg.Size && c.evictAny(i); i++ {
	}
	return nil
}

// Now returns the instant of the query path: the monotonic time since the
// cache was made.
func (c *Cache) Now() time.Duration { return time.Since(c.base) }

// limit returns how many bytes a segment may take at most. What negatives and
// failures leave is the positive answers'; the protected ones have three fifths
// of the whole, so that there is always a probation segment to evict from.
func (c *Cache) limit(seg segment) int64 {
	size := c.size.Load()
	switch seg {
	case protected:
		return size / 5 * 3
	case negative:
		return size / 4
	case failures:
		return size / 32
	default:
		return size
	}
}

// hash returns the key's hash in the two parts that are used: which shard, and
// the node's tag there.
func (c *Cache) hash(key []byte) (shard int, tag uint32) {
	h := maphash.Bytes(c.seed, key)
	return int(h >> shardShift), uint32(h) //nolint:gosec // the low half
}

// makeRoom accounts for a node of so many bytes that is about to enter a
// segment of the shard, and evicts what is too much then.
func (c *Cache) makeRoom(seg segment, bytes int64, shard int) {
	c.used.Add(bytes)
	if seg == negative || seg == failures {
		for c.segmentUsed[seg].Load()+bytes > c.limit(seg) && c.evict(seg, shard) {
		}
	}
	for c.used.Load() > c.size.Load() && c.evictAny(shard) {
	}
}

// evictAny evicts one node from the first segment that has any. Since the
// others have limits, that is probation unless the size has just shrunk.
func (c *Cache) evictAny(shard int) bool {
	return c.evict(probation, shard) || c.evict(protected, shard) || c.evict(negative, shard) || c.evict(failures, shard)
}

// evict takes the least recently used node out of a segment, in the shard or
// in the next one that has any.
func (c *Cache) evict(seg segment, shard int) bool {
	for i := range shards {
		s := &c.shards[(shard+i)%shards]
		s.mu.Lock()
		n := s.lists[seg].oldest
		if n != nil {
			s.drop(c, n)
			s.evictions[seg]++
		}
		s.mu.Unlock()
		if n != nil {
			return true
		}
	}
	return false
}
