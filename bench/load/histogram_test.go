package main

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestBucketBounds(t *testing.T) {
	// Every value lies in a bucket no wider than 1/128 of it, and buckets follow
	// each other without a gap.
	for _, v := range []uint64{0, 1, 127, 128, 129, 255, 256, 257, 1000, 1 << 20, 1<<20 + 1, 1<<40 - 1, math.MaxInt64} {
		i := bucket(v)
		if up := upper(i); v > up || up-v > v>>subBits {
			t.Errorf("bucket(%d) = %d, which ends at %d", v, i, up)
		}
		if i > 0 && upper(i-1) >= v {
			t.Errorf("%d belongs to bucket %d, but the one before ends at %d", v, i, upper(i-1))
		}
	}
}

func TestQuantile(t *testing.T) {
	var h histogram
	if got := h.quantile(0.99); got != 0 {
		t.Errorf("quantile of nothing = %v", got)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	values := make([]time.Duration, 100_000)
	for i := range values {
		values[i] = time.Duration(rng.ExpFloat64() * float64(50*time.Microsecond))
		h.record(values[i])
	}
	slices.Sort(values)
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 0.999, 1} {
		want := values[max(int(math.Ceil(q*float64(len(values))))-1, 0)]
		if got := h.quantile(q); got < want || got > want+want/128 {
			t.Errorf("quantile(%v) = %v, want %v within 1/128", q, got, want)
		}
	}
	if got, want := h.max, values[len(values)-1]; got != want {
		t.Errorf("max = %v, want %v", got, want)
	}
}

func BenchmarkRecord(b *testing.B) {
	var h histogram
	b.ReportAllocs()
	for b.Loop() {
		h.record(31 * time.Microsecond)
	}
}
