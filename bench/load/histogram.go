package main

import (
	"math/bits"
	"time"
)

// subBits sets the histogram's precision: 2^subBits buckets per power of two,
// hence values within 1/128 = 0.8 %.
const subBits = 7

// histogram counts durations in buckets whose width grows with the value, in the
// manner of HDR histograms: constant memory, constant time, no allocation.
type histogram struct {
	buckets [(64 - subBits + 1) << subBits]uint64
	count   uint64
	sum     time.Duration
	max     time.Duration
}

func (h *histogram) record(d time.Duration) {
	d = max(d, 0)
	h.buckets[bucket(uint64(d))]++
	h.count++
	h.sum += d
	h.max = max(h.max, d)
}

// bucket is the index of v: exact below 2^subBits, then by leading bits.
func bucket(v uint64) int {
	shift := max(bits.Len64(v)-subBits-1, 0)
	return shift<<subBits + int(v>>shift)
}

// upper is the largest value in bucket i.
func upper(i int) uint64 {
	shift := max(i>>subBits-1, 0)
	return uint64(i-shift<<subBits+1)<<shift - 1
}

// quantile is the value that a share q of all records does not exceed; within the
// bucket's width, and never above the largest record.
func (h *histogram) quantile(q float64) time.Duration {
	if h.count == 0 {
		return 0
	}
	want := uint64(q * float64(h.count))
	if float64(want) < q*float64(h.count) {
		want++
	}
	want = max(want, 1)
	var seen uint64
	for i, n := range h.buckets {
		if seen += n; seen >= want {
			return min(time.Duration(upper(i)), h.max)
		}
	}
	return h.max
}

func (h *histogram) mean() time.Duration {
	if h.count == 0 {
		return 0
	}
	return h.sum / time.Duration(h.count)
}
