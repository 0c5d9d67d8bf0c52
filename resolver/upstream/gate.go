package upstream

import (
	"context"
	"slices"
	"sync"
	"time"
)

// A server that has not answered yet may not have read yet: what is sent to it
// waits in the buffer of its socket, which holds about 270 questions by default
// (net.core.rmem_default; the kernel counts 768 octets for each). A burst beyond,
// such as a proxy's 1,000 names at its start, is lost there while the server waits
// for a CPU. Too much for a retry's budget.
const (
	// gateWidth is how many questions of a route may be young, that is, without
	// an answer and sent less than gateAge ago. That lets 2,000 questions a second
	// pass even where answers take long, and any number where they do not.
	gateWidth = 200
	gateAge   = 100 * time.Millisecond
	// gateWait is how long a question waits at most until it goes anyway, but no
	// longer than a third of Timeouts.Total, of which it is part: see
	// Question.Waited.
	gateWait = 400 * time.Millisecond

	gateSlots = 10
	gateSlot  = gateAge / gateSlots
)

// gate spreads bursts of questions to a route.
type gate struct {
	mu    sync.Mutex
	young int            // the sum of slots
	slots [gateSlots]int // questions by the time at which they passed, in a ring
	slot  int64          // the present slot, counted from the beginning
	queue []chan<- int64 // who waits, in order; each is sent its slot
	timer *time.Timer    // while somebody waits
	now   func() time.Duration
	wait  time.Duration // see gateWait
}

// enter waits until a question may be sent. It returns what leave has to be told.
func (g *gate) enter(ctx context.Context) (slot int64) {
	g.mu.Lock()
	g.advance()
	if len(g.queue) == 0 && g.young < gateWidth {
		defer g.mu.Unlock()
		return g.pass()
	}
	pass := make(chan int64, 1)
	g.queue = append(g.queue, pass)
	if g.timer == nil {
		g.timer = time.AfterFunc(gateSlot, g.tick)
	}
	g.mu.Unlock()
	late := time.NewTimer(g.wait)
	defer late.Stop()
	select {
	case slot = <-pass:
		return slot
	case <-late.C:
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.queue, chan<- int64(pass)); i >= 0 {
		g.queue = slices.Delete(g.queue, i, i+1)
		g.advance()
		return g.pass()
	}
	return <-pass // it came meanwhile
}

// leave says that a question which passed in the slot is under way no more.
func (g *gate) leave(slot int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.advance()
	if slot > g.slot-gateSlots {
		g.slots[slot%gateSlots]--
		g.young--
	}
	g.admit()
}

// pass counts a question; the caller holds mu.
func (g *gate) pass() (slot int64) {
	g.slots[g.slot%gateSlots]++
	g.young++
	return g.slot
}

// admit lets those pass for whom there is room; the caller holds mu.
func (g *gate) admit() {
	n := 0
	for ; n < len(g.queue) && g.young < gateWidth; n++ {
		g.queue[n] <- g.pass()
	}
	g.queue = slices.Delete(g.queue, 0, n)
}

// advance forgets what is not young any more; the caller holds mu.
func (g *gate) advance() {
	slot := int64(g.now() / gateSlot)
	for range min(slot-g.slot, gateSlots) {
		g.slot++
		g.young -= g.slots[g.slot%gateSlots]
		g.slots[g.slot%gateSlots] = 0
	}
	g.slot = slot
}

// tick lets those pass who have waited for others to grow old.
func (g *gate) tick() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.advance()
	g.admit()
	if len(g.queue) == 0 {
		g.timer = nil
		return
	}
	g.timer.Reset(gateSlot)
}
