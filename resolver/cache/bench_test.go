package cache

import (
	"fmt"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// benchmarkNames are how many names the look-up benchmarks go through: what
// fits the processor's caches, and what does not.
var benchmarkNames = []int{1000, 100_000}

func benchmarkCache(b *testing.B, names int) (c *Cache, keys, queries [][]byte) {
	b.Helper()
	c = newCache(b, 64<<20)
	fill(b, c, 0, names)
	for i := range names {
		name := numbered(i)
		keys = append(keys, AppendKey(nil, name, dnswire.TypeA, dnswire.ClassIN, false, false))
		queries = append(queries, dnswire.AppendQuery(nil, 1, dnswire.FlagRD, name, dnswire.TypeA, dnswire.ClassIN, nil))
	}
	b.ReportAllocs()
	b.ResetTimer()
	return c, keys, queries
}

// stride makes successive names fall far apart.
const stride = 7919

func BenchmarkLookup(b *testing.B) {
	for _, names := range benchmarkNames {
		b.Run(fmt.Sprintf("names=%d", names), func(b *testing.B) {
			c, keys, _ := benchmarkCache(b, names)
			i := 0
			for b.Loop() {
				if _, kind := c.Lookup(keys[i], 0); kind != Positive {
					b.Fatal(kind)
				}
				i = (i + stride) % names
			}
		})
	}
}

// BenchmarkHit is the cache's whole part of a hit, from the datagram to the
// reply.
func BenchmarkHit(b *testing.B) {
	for _, names := range benchmarkNames {
		b.Run(fmt.Sprintf("names=%d", names), func(b *testing.B) {
			c, _, queries := benchmarkCache(b, names)
			h := newHitter(c)
			i := 0
			for b.Loop() {
				h.hit(b, queries[i])
				i = (i + stride) % names
			}
		})
	}
}

func BenchmarkHitParallel(b *testing.B) {
	for _, names := range benchmarkNames {
		b.Run(fmt.Sprintf("names=%d", names), func(b *testing.B) {
			c, _, queries := benchmarkCache(b, names)
			b.RunParallel(func(pb *testing.PB) {
				h := newHitter(c)
				i := 0
				for pb.Next() {
					h.hit(b, queries[i])
					i = (i + stride) % names
				}
			})
		})
	}
}

type hitter struct {
	c        *Cache
	q        dnswire.Query
	key, buf []byte
}

func newHitter(c *Cache) *hitter {
	return &hitter{c: c, key: make([]byte, 0, dnswire.MaxNameLen+5), buf: make([]byte, 0, 1232)}
}

func (h *hitter) hit(b *testing.B, query []byte) {
	dnswire.ParseQuery(query, &h.q)
	h.key = AppendKey(h.key[:0], h.q.Name(query), h.q.Type, h.q.Class, h.q.DO, h.q.CD())
	e, kind := h.c.Lookup(h.key, 2*time.Second)
	if kind != Positive {
		b.Error(kind)
	}
	h.buf = e.AppendReply(h.buf[:0], query, &h.q, ReplyOptions{Now: 2 * time.Second, Limit: 512})
}

func BenchmarkAppendReply(b *testing.B) {
	for _, bm := range []struct {
		name    string
		records int
		opt     *dnswire.OPT
		o       ReplyOptions
	}{
		{"records=1", 1, nil, ReplyOptions{Limit: 512}},
		{"records=1,aged", 1, nil, ReplyOptions{Limit: 512, Now: time.Minute}},
		{"records=1,edns", 1, &dnswire.OPT{Size: 1232}, ReplyOptions{Limit: 1232}},
		{"records=1,stale", 1, &dnswire.OPT{Size: 1232}, ReplyOptions{Limit: 1232, Stale: true}},
		{"records=30,aged", 30, nil, ReplyOptions{Limit: 1232, Now: time.Minute}},
		{"records=30,cut", 30, nil, ReplyOptions{Limit: 512, Now: time.Minute}},
		{"records=3700,cut", 3700, nil, ReplyOptions{Limit: 512, Now: time.Minute}}, // 60 KB
		{"records=3700,cut,edns", 3700, &dnswire.OPT{Size: 1232}, ReplyOptions{Limit: 1232, Now: time.Minute}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			c := newCache(b, 8<<20)
			name := numbered(1)
			wire := rawAnswer(name, 300, bm.records)
			var r dnswire.Response
			if err := dnswire.ParseResponse(wire, &r); err != nil {
				b.Fatal(err)
			}
			e, _ := c.Store(AppendKey(nil, name, dnswire.TypeA, dnswire.ClassIN, false, false), wire, &r, 0)
			query := dnswire.AppendQuery(nil, 1, dnswire.FlagRD, name, dnswire.TypeA, dnswire.ClassIN, bm.opt)
			var q dnswire.Query
			dnswire.ParseQuery(query, &q)
			buf := make([]byte, 0, 2048)
			b.ReportAllocs()
			for b.Loop() {
				buf = e.AppendReply(buf[:0], query, &q, bm.o)
			}
		})
	}
}

func BenchmarkStore(b *testing.B) {
	plainAnswer := rawAnswer(numbered(1), 300, 4)
	spelled := rawAnswer(numbered(1), 300, 1)
	second := len(spelled)
	spelled = append(spelled, numbered(1)...)
	spelled = append(spelled, spelled[second-14:second]...)
	dnswire.SetCounts(spelled, 1, 2, 0, 0)
	for _, bm := range []struct {
		name string
		wire []byte
	}{{"plain", plainAnswer}, {"repacked", spelled}} {
		b.Run(bm.name, func(b *testing.B) {
			c := newCache(b, 4<<20)
			var r dnswire.Response
			if err := dnswire.ParseResponse(bm.wire, &r); err != nil {
				b.Fatal(err)
			}
			key := AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false)
			b.ReportAllocs()
			for b.Loop() {
				if _, ok := c.Store(key, bm.wire, &r, 0); !ok {
					b.Fatal("not cached")
				}
			}
		})
	}
	b.Run("evicting", func(b *testing.B) {
		c := newCache(b, MinSize)
		fill(b, c, 0, 2000)
		wire := rawAnswer(numbered(1), 300, 1)
		var r dnswire.Response
		if err := dnswire.ParseResponse(wire, &r); err != nil {
			b.Fatal(err)
		}
		key := AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false)
		digits := key[6:12]
		b.ReportAllocs()
		for b.Loop() {
			// The next name, in the key and in the answer.
			for i := len(digits) - 1; i >= 0; i-- {
				if digits[i]++; digits[i] <= '9' {
					break
				}
				digits[i] = '0'
			}
			copy(wire[dnswire.HeaderLen+6:], digits)
			if _, ok := c.Store(key, wire, &r, 0); !ok {
				b.Fatal("not cached")
			}
		}
	})
}
