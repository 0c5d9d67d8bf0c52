package ctguard

import (
	"testing"
	"time"
)

func TestBucket(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	b := bucket{limit: Limit{PerSecond: 2, Burst: 5}}
	for _, tt := range []struct {
		after      time.Duration // since start
		want, take int
	}{
		{0, 3, 3},
		{0, 2, 10},
		{0, 0, 1},
		{400 * time.Millisecond, 0, 1},
		{500 * time.Millisecond, 1, 1},
		{2 * time.Second, 3, 9},
		{time.Hour, 5, 9}, // no more than the burst
	} {
		if got := b.take(tt.take, start.Add(tt.after)); got != tt.want {
			t.Errorf("after %v: %d of %d, want %d", tt.after, got, tt.take, tt.want)
		}
	}
}

func TestHistogram(t *testing.T) {
	var h Histogram
	if h.Count() != 0 {
		t.Error("not empty")
	}
	for _, d := range []time.Duration{0, time.Millisecond, time.Millisecond + 1, 99 * time.Millisecond, 100 * time.Millisecond, time.Hour} {
		h.observe(d)
	}
	for bound, want := range map[int]uint64{0: 2, 1: 1, 6: 2, len(h.Bounds): 1} {
		if h.Counts[bound] != want {
			t.Errorf("bucket %d: %d, want %d", bound, h.Counts[bound], want)
		}
	}
	if h.Count() != 6 || h.Sum < time.Hour {
		t.Errorf("count %d, sum %v", h.Count(), h.Sum)
	}
}

// TestSurveyIsBounded: a sweep keeps no more stale flows than can be deleted at
// once, however many there are.
func TestSurveyIsBounded(t *testing.T) {
	p := NewPolicy(services(kubeDNS()), Facts{})
	s := newSurvey()
	s.room = 4
	for range 10 {
		s.add(p, flow(client, vip4, podA))
	}
	if len(s.stale) != 4 || s.over != 6 || s.flows[Stale] != 10 {
		t.Errorf("%d kept, %d left out, flows %v", len(s.stale), s.over, s.flows)
	}
}
