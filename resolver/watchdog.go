package resolver

import (
	"runtime"
	"sync/atomic"
	"time"
)

// heartbeat tells a goroutine that works from one that waits for the kernel,
// which may take for ever.
type heartbeat struct {
	since atomic.Int64  // when the work began, as the cache counts time; 0: waiting
	steps atomic.Uint64 // of the work, all together

	// Of CloseStuck: the step that it saw last, since when, and in how many calls.
	seen      int64
	seenSteps uint64
	seenAt    time.Duration
	calls     int
}

// begin says that work begins at now.
func (h *heartbeat) begin(now time.Duration) { h.since.Store(max(1, int64(now))) }

// step says that the work gets on. One goroutine calls it.
func (h *heartbeat) step() { h.steps.Store(h.steps.Load() + 1) }

// end says that it has ended.
func (h *heartbeat) end() { h.since.Store(0) }

// stuckCalls is in how many calls CloseStuck must have seen a piece of work. A
// process that was stopped (SIGSTOP, a frozen cgroup, a paused machine) finds all
// that it was at to be old when it goes on; its readers go on as well, and are
// elsewhere at the next call.
const stuckCalls = 3

// stuck reports whether the goroutine has been at one step of its work for longer
// than limit, and in several calls that counted.
func (h *heartbeat) stuck(now, limit time.Duration, counts bool) bool {
	since, steps := h.since.Load(), h.steps.Load()
	switch {
	case since != h.seen: // new work: it began when it says
		h.seenAt, h.calls = time.Duration(since), 0
	case steps != h.seenSteps: // it gets on, slowly
		h.seenAt, h.calls = now, 0
	}
	h.seen, h.seenSteps = since, steps
	if counts {
		h.calls++
	}
	return since != 0 && now-h.seenAt > limit && h.calls >= stuckCalls
}

// canary tells a process that has more to do than it gets CPU for. There a
// goroutine that was preempted in the middle of its work waits behind hundreds
// of others: it does not stand still, it stands in line.
type canary struct {
	flying atomic.Bool
	seed   atomic.Pointer[[64]byte]
}

// landed sends out a goroutine that goes to the end of the line, and reports
// whether the one before has come through: then so has everyone who stood in
// line when that one came. There are other lines than the scheduler's: work goes
// through those of the locks that the readers take, and the canary takes memory,
// for which a process that has none left makes everyone collect garbage.
func (c *canary) landed(work func()) bool {
	if c.flying.Swap(true) {
		return false
	}
	go func() { // ends once everybody gets on
		runtime.Gosched()
		c.seed.Store(new([64]byte))
		work()
		c.flying.Store(false)
	}()
	return true
}

// standInLine waits for the locks that readers and acceptors wait for. Whoever
// stands still with one of them stops them all: closing one socket would help
// nobody.
func (r *Resolver) standInLine() {
	r.flights.mu.Lock()
	_ = r.flights.waiters
	r.flights.mu.Unlock()
	r.conns.mu.Lock()
	_ = r.conns.hurried
	r.conns.mu.Unlock()
}

// CloseStuck gives up the socket of every reader and acceptor that has been at
// one piece of work for longer than limit, so that the kernel gives its clients
// to the others, and returns how many it gave up. A batch takes about a
// millisecond; one that takes a second never ends, and its socket would keep on
// collecting queries that nobody reads. Call it several times a second: it takes
// three calls to tell a goroutine that stands still from a process that did, and
// in a process that cannot keep up with its work it takes as long as that lasts.
func (r *Resolver) CloseStuck(limit time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, n := r.cache.Now(), 0
	counts := r.canary.landed(r.standInLine)
	for _, svc := range r.serving {
		for _, u := range svc.readers {
			if u.beat.stuck(now, limit, counts) && !u.stuck.Swap(true) {
				u.abandon()
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
