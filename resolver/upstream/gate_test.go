package upstream

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// buffered is a server whose socket holds so many questions, which it reads one
// after the other, each taking so long; it begins after a while.
func buffered(room int, each, after time.Duration) func(*fakeQuery) {
	var mu sync.Mutex
	var free time.Time
	var waiting []time.Time // when each that waits is read
	return func(q *fakeQuery) {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		if free.IsZero() {
			free = now.Add(after)
		}
		for len(waiting) > 0 && !waiting[0].After(now) {
			waiting = waiting[1:]
		}
		if len(waiting) >= room {
			return // dropped
		}
		if free.Before(now) {
			free = now
		}
		free = free.Add(each)
		waiting = append(waiting, free)
		q.reply(free.Sub(now), q.good())
	}
}

// TestBurst: 1,000 names at once, as a proxy with as many clusters asks at its
// start, to a server with a socket buffer of the usual size that has to wait for a
// CPU first.
func TestBurst(t *testing.T) {
	const names = 1000
	for _, after := range []time.Duration{0, 20 * ms, 80 * ms} {
		for _, each := range []time.Duration{20 * time.Microsecond, 200 * time.Microsecond} {
			t.Run(fmt.Sprintf("begins after %v, %v each", after, each), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNet(t, buffered(270, each, after))
					f := n.forwarder(Config{Budget: usual})
					var answered atomic.Int64
					var wg sync.WaitGroup
					start := time.Now()
					for i := range names {
						wg.Go(func() {
							if _, err := f.Exchange(t.Context(), query(fmt.Sprintf("n%d.example.", i))); err == nil {
								answered.Add(1)
							}
						})
					}
					wg.Wait()
					sent := len(n.queries())
					t.Logf("%d answered in %v, %d sent", answered.Load(), time.Since(start), sent)
					if answered.Load() != names {
						t.Errorf("%d of %d answered", answered.Load(), names)
					}
					if sent > names*11/10 {
						t.Errorf("%d sent for %d", sent, names)
					}
				})
			})
		}
	}
}

// TestGate: what passes at once, what waits, and for how long.
func TestGate(t *testing.T) {
	// enterAll enters so many and returns the times after which they passed.
	enterAll := func(g *gate, ctx context.Context, count int) (waits []time.Duration, slots []int64) {
		waits, slots = make([]time.Duration, count), make([]int64, count)
		var wg sync.WaitGroup
		start := time.Now()
		for i := range count {
			wg.Go(func() {
				slots[i] = g.enter(ctx)
				waits[i] = time.Since(start)
			})
			synctest.Wait() // one after the other
		}
		wg.Wait()
		return waits, slots
	}
	run := func(name string, f func(t *testing.T, g *gate)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := time.Now()
				f(t, &gate{now: func() time.Duration { return time.Since(base) }, wait: gateWait})
			})
		})
	}
	expect := func(t *testing.T, waits []time.Duration, from, to int, least, most time.Duration) {
		t.Helper()
		for i, w := range waits[from:to] {
			if w < least || w > most {
				t.Errorf("number %d waited %v, want %v to %v", from+i, w, least, most)
				return
			}
		}
	}
	run("no answers: so many an age, and none longer than the bound", func(t *testing.T, g *gate) {
		waits, _ := enterAll(g, t.Context(), 1200)
		expect(t, waits, 0, 200, 0, 0)
		expect(t, waits, 200, 400, gateAge-gateSlot, gateAge+gateSlot)
		expect(t, waits, 600, 800, 3*gateAge-3*gateSlot, 3*gateAge+3*gateSlot)
		expect(t, waits, 1000, 1200, gateWait, gateWait)
	})
	run("an answer makes room at once", func(t *testing.T, g *gate) {
		_, slots := enterAll(g, t.Context(), gateWidth)
		passed := make(chan time.Duration)
		start := time.Now()
		go func() {
			g.enter(t.Context())
			passed <- time.Since(start)
		}()
		time.Sleep(ms)
		g.leave(slots[0])
		if d := <-passed; d != ms {
			t.Errorf("passed after %v, want 1 ms", d)
		}
	})
	run("who has grown old leaves no room twice", func(t *testing.T, g *gate) {
		_, slots := enterAll(g, t.Context(), gateWidth)
		time.Sleep(2 * gateAge)
		enterAll(g, t.Context(), gateWidth)
		for _, s := range slots {
			g.leave(s)
		}
		if waits, _ := enterAll(g, t.Context(), 1); waits[0] < gateAge-gateSlot {
			t.Errorf("one more than there is room for passed after %v", waits[0])
		}
		if g.young < 0 || g.young > gateWidth {
			t.Errorf("%d young", g.young)
		}
	})
	run("who gives up makes way", func(t *testing.T, g *gate) {
		enterAll(g, t.Context(), gateWidth)
		ctx, cancel := context.WithTimeout(t.Context(), ms)
		defer cancel()
		if waits, _ := enterAll(g, ctx, 1); waits[0] != ms {
			t.Errorf("returned after %v, want 1 ms", waits[0])
		}
		if len(g.queue) != 0 {
			t.Errorf("%d still in the queue", len(g.queue))
		}
	})
}
