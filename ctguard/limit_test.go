package ctguard

import (
	"net/netip"
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

// TestSurveyForgetsForeignFlows: what a sweep needs does not depend on them. A
// resolver on the node has flows to as many servers as there are.
func TestSurveyForgetsForeignFlows(t *testing.T) {
	p := NewPolicy(services(kubeDNS(endpoint(podA, nil, nil))), Facts{Evidence: true})
	s := newSurvey()
	for i := range 1000 {
		server := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), 53).String()
		s.add(p, flow(client, server, server))
	}
	s.add(p, flow(client, vip4, podA))
	if len(s.pairs) != 1 || len(s.flows) != 1 {
		t.Errorf("%d pairs, flows %v", len(s.pairs), s.flows)
	}
	for i := range 2 * mostKnown {
		f := flow(netip.AddrPortFrom(netip.MustParseAddr("10.244.1.1"), uint16(i)).String(), vip4, podA)
		f.SeenReply, f.Packets, f.Replies = true, 9, 1
		s.add(p, f)
	}
	if len(s.waiting) != mostKnown {
		t.Errorf("%d flows with unanswered queries are kept", len(s.waiting))
	}
}
