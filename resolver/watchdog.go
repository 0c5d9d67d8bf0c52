package resolver

import (
	"runtime"
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
// process that was stopped (SIGSTOP, a frozen cgroup, a paused machine) finds all
// that it was at to be old when it goes on; its readers go on as well, and are
// elsewhere at the next call.
const stuckCalls = 3

// stuck reports whether the goroutine has been at one piece of work for longer
// than limit, and in several calls that counted.
func (h *heartbeat) stuck(now, limit time.Duration, counts bool) bool {
	since := h.since.Load()
	if since != h.seen {
		h.seen, h.calls = since, 0
	}
	if counts {
		h.calls++
	}
	return since != 0 && now-time.Duration(since) > limit && h.calls >= stuckCalls
}

// canary tells a process that has more to do than it gets CPU for. There a
// goroutine that was preempted in the middle of its work waits behind hundreds
// of others: it does not stand still, it stands in line.
type canary struct{ flying atomic.Bool }

// landed sends out a goroutine that goes to the end of the line, and reports
// whether the one before has come through: then so has everyone who stood in
// line when that one came.
func (c *canary) landed() bool {
	if c.flying.Swap(true) {
		return false
	}
	go func() { // ends by itself, with nothing to wait for
		runtime.Gosched()
		c.flying.Store(false)
	}()
	return true
}

// CloseStuck closes the socket of every reader and acceptor that has been at
// one piece of work for longer than limit, so that the kernel gives its clients
// to the others, and returns how many it closed. A batch takes about a
// millisecond; one that takes a second never ends, and its socket would keep on
// collecting queries that nobody reads. Call it several times a second: it takes
// three calls to tell a goroutine that stands still from a process that did, and
// in a process that cannot keep up with its work it takes as long as that lasts.
func (r *Resolver) CloseStuck(limit time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, n := r.cache.Now(), 0
	counts := r.canary.landed()
	for _, svc := range r.serving {
		for _, u := range svc.readers {
			if u.beat.stuck(now, limit, counts) && !u.stuck.Swap(true) {
				_ = u.conn.Close()
				n++
			}
		}
		for _, a := range svc.acceptors {
			if a.beat.stuck(now, limit, counts) && !a.stuck.Swap(true) {
				_ = a.l.Close()
				n++
			}
		}
	}
	r.stuck += uint64(n) //nolint:gosec // a count
	return n
}
