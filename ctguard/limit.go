package ctguard

import "time"

// Limit bounds how many flows are deleted. It is there for the error that
// nobody has thought of: what is right deletes a few flows, rarely.
type Limit struct {
	PerSecond float64 // in the long run
	Burst     int     // at once
}

// DefaultLimit lets a node lose all flows to a busy DNS pod at once (1,000
// queries a second, each from a fresh port, keep 30,000 entries), and then as
// many as a lagging kube-proxy can make again.
func DefaultLimit() Limit { return Limit{PerSecond: 2000, Burst: 50_000} }

// bucket is a token bucket.
type bucket struct {
	limit  Limit
	tokens float64
	at     time.Time
}

// take grants up to n.
func (b *bucket) take(n int, now time.Time) int {
	if b.at.IsZero() {
		b.tokens = float64(b.limit.Burst)
	} else {
		b.tokens = min(float64(b.limit.Burst), b.tokens+b.limit.PerSecond*now.Sub(b.at).Seconds())
	}
	b.at = now
	n = min(n, int(b.tokens))
	b.tokens -= float64(n)
	return n
}
