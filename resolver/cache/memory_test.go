package cache

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// rawAnswer builds the answer to an A question for the presentation-free name
// given by labels, with n address records, as an upstream would pack it.
func rawAnswer(name []byte, ttl uint32, n int) []byte {
	msg := dnswire.AppendQuery(nil, 1, dnswire.FlagQR|dnswire.FlagRD|dnswire.FlagRA, name, dnswire.TypeA, dnswire.ClassIN, nil)
	dnswire.SetCounts(msg, 1, uint16(n), 0, 0)
	for i := range n {
		msg = append(msg, 0xc0, 12, 0, 1, 0, 1)
		msg = binary.BigEndian.AppendUint32(msg, ttl)
		msg = append(msg, 0, 4, 192, 0, 2, byte(i))
	}
	return msg
}

// numbered returns the wire form of host-000001.shop.example.com and the like,
// 30 octets.
func numbered(i int) []byte {
	return fmt.Appendf(nil, "\x0bhost-%06d\x04shop\x07example\x03com\x00", i)
}

// fill stores count answers to different names, and returns how many were kept.
func fill(tb testing.TB, c *Cache, from, count int) (kept int) {
	tb.Helper()
	var r dnswire.Response
	var key []byte
	for i := from; i < from+count; i++ {
		name := numbered(i)
		msg := rawAnswer(name, 300, 1)
		if err := dnswire.ParseResponse(msg, &r); err != nil {
			tb.Fatal(err)
		}
		key = AppendKey(key[:0], name, dnswire.TypeA, dnswire.ClassIN, false, false)
		if _, ok := c.Store(key, msg, &r, c.Now()); ok {
			kept++
		}
	}
	return kept
}

func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func newCache(tb testing.TB, size int64) *Cache {
	tb.Helper()
	c, err := New(Config{Size: size, Zones: []Zone{{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute, Stale: time.Hour}}})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// The budget is a promise about the heap.
func TestMemoryIsWhatIsAccounted(t *testing.T) {
	const count = 100_000
	for _, tt := range []struct {
		name   string
		size   int64
		evicts bool
	}{
		{"all fit", 64 << 20, false},
		{"half of them fit", 10 << 20, true},
		{"few fit", 1 << 20, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := heapBytes()
			c := newCache(t, tt.size)
			fill(t, c, 0, count)
			heap := heapBytes() - before
			st := c.Stats()
			t.Logf("%d entries: heap %d, accounted %d (%+.1f %%), budget %d; %.0f bytes an entry",
				st.Entries(), heap, st.Bytes, 100*float64(heap-st.Bytes)/float64(st.Bytes), st.Size, float64(heap)/float64(st.Entries()))
			within := func(what string, got, want int64) {
				if got < want*85/100 || got > want*115/100 {
					t.Errorf("heap %d bytes, %s %d: off by more than 15 %%", got, what, want)
				}
			}
			within("accounted", heap, st.Bytes)
			if tt.evicts {
				within("configured", heap, st.Size)
			}
			if evicted := st.Evictions() > 0; evicted != tt.evicts {
				t.Errorf("%d evictions", st.Evictions())
			}
			if tt.evicts != (st.Entries() < count) {
				t.Errorf("%d entries", st.Entries())
			}
			runtime.KeepAlive(c)
		})
	}
}
