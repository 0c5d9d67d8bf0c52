package resolver

import (
	"sync/atomic"
	"time"
)

// heartbeat tells a goroutine that works from one that waits for the kernel,
// which may take for ever.
type heartbeat struct {
	since atomic.Int64 // when the work began, as the cache counts time; 0: waiting
}

// begin says that work begins at now.
func (h *heartbeat) begin(now time.Duration) { h.since.Store(max(1, int64(now))) }

// end says that it has ended.
func (h *heartbeat) end() { h.since.Store(0) }

// busy returns for how long the goroutine has been at its work.
func (h *heartbeat) busy(now time.Duration) time.Duration {
	since := h.since.Load()
	if since == 0 {
		return 0
	}
	return now - time.Duration(since)
}

// CloseStuck closes the socket of every reader and acceptor that has been at
// one piece of work for longer than limit, so that the kernel gives its clients
// to the others, and returns how many it closed. A batch takes about a
// millisecond; one that takes a second never ends, and its socket would keep on
// collecting queries that nobody reads. Call it several times a second.
func (r *Resolver) CloseStuck(limit time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, n := r.cache.Now(), 0
	for _, svc := range r.serving {
		for _, u := range svc.readers {
			if u.beat.busy(now) > limit && !u.stuck.Swap(true) {
				_ = u.conn.Close()
				n++
			}
		}
		for _, a := range svc.acceptors {
			if a.beat.busy(now) > limit && !a.stuck.Swap(true) {
				_ = a.l.Close()
				n++
			}
		}
	}
	r.stuck += uint64(n) //nolint:gosec // a count
	return n
}
