package cache

import "testing"

// audit checks that everything in the cache is accounted, listed and found.
// Nobody else may use the cache meanwhile.
func audit(t *testing.T, c *Cache) {
	t.Helper()
	used := fixedBytes
	var segmentUsed [segments]int64
	for i := range c.shards {
		s := &c.shards[i]
		listed := map[*table]int{}
		for seg := range segments {
			l := &s.lists[seg]
			n := 0
			var prev *node
			for at := l.newest; at != nil; prev, at = at, at.next {
				n++
				segmentUsed[seg] += at.bytes()
				switch {
				case at.prev != prev:
					t.Fatal("list is broken")
				case at.segment != seg:
					t.Fatalf("node of segment %d in the list of %d", at.segment, seg)
				}
				key := []byte(Entry{blob: at.blob}.key())
				if shard, tag := c.hash(key); shard != i || tag != at.tag {
					t.Fatalf("%q is in the wrong shard", key)
				}
				if s.table(seg).find(at.tag, key) != at {
					t.Fatalf("%q is listed but not found", key)
				}
			}
			if l.oldest != prev || l.n != n {
				t.Fatalf("list of %d nodes says %d", n, l.n)
			}
			listed[s.table(seg)] += n
		}
		for _, tab := range []*table{&s.answers, &s.failed} {
			used += bucketBytes * int64(len(tab.buckets))
			n := 0
			for _, at := range tab.buckets {
				for ; at != nil; at = at.chain {
					n++
				}
			}
			if n != tab.n || n != listed[tab] {
				t.Fatalf("table of %d nodes says %d, and %d are listed", n, tab.n, listed[tab])
			}
		}
	}
	for seg, bytes := range segmentUsed {
		used += bytes
		if got := c.segmentUsed[seg].Load(); got != bytes {
			t.Errorf("segment %d: %d bytes accounted, %d used", seg, got, bytes)
		}
	}
	if got := c.used.Load(); got != used {
		t.Errorf("%d bytes accounted, %d used", got, used)
	}
}
