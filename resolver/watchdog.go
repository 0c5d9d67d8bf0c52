package resolver

import (
	"sync/atomic"
	"time"
)

// heartbeat tells a goroutine that works from one that waits for the kernel,
// which may take for ever.
type heartbeat struct {
	since atomic.Int64 // when the work began, as the cache counts time; 0: waiting

	// Of CloseStuck: the work that it saw last, and in how many calls.
	seen  int64
	calls int
}

// begin says that work begins at now.
func (h *heartbeat) begin(now time.Duration) { h.since.Store(max(1, int64(now))) }

// end says that it has ended.
func (h *heartbeat) end() { h.since.Store(0) }

// stuckCalls is in how many calls CloseStuck must have seen a piece of work. A
// process that was stopped (SIGSTOP, a frozen cgroup, a paused machine) or
// starved of CPU finds all that it was at to be old when it goes on; its readers
// go on as well, and are elsewhere at the next call.
const stuckCalls = 3

// stuck reports whether the goroutine has been at one piece of work for longer
// than limit, and in several calls.
func (h *heartbeat) stuck(now, limit time.Duration) bool {
	since := h.since.Load()
	if since != h.seen {
		h.seen, h.calls = since, 0
	}
	h.calls++
	return since != 0 && now-time.Duration(since) > limit && h.calls >= stuckCalls
}

// CloseStuck closes the socket of every reader and acceptor that has been at
// one piece of work for longer than limit, so that the kernel gives its clients
// to the others, and returns how many it closed. A batch takes about a
// millisecond; one that takes a second never ends, and its socket would keep on
// collecting queries that nobody reads. Call it several times a second: it takes
// three calls to tell a goroutine that stands still from a process that did.
func (r *Resolver) CloseStuck(limit time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, n := r.cache.Now(), 0
	for _, svc := range r.serving {
		for _, u := range svc.readers {
			if u.beat.stuck(now, limit) && !u.stuck.Swap(true) {
				_ = u.conn.Close()
				n++
			}
		}
		for _, a := range svc.acceptors {
			if a.beat.stuck(now, limit) && !a.stuck.Swap(true) {
				_ = a.l.Close()
				n++
			}
		}
	}
	r.stuck += uint64(n) //nolint:gosec // a count
	return n
}
