package resolver

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Idle times of TCP connections. RFC 7766 section 6.2.3 wants "on the order of
// seconds"; what holds is announced to clients that ask (RFC 7828).
const (
	idleTimeout = 10 * time.Second
	// idleCrowded holds while more than three quarters of the connections
	// are taken, so that those that do nothing make room.
	idleCrowded = time.Second
	// outputBudget bounds the octets of answers that wait for TCP clients
	// to take them, all connections together, but that each may have
	// outputShare: those who take their answers do not suffer from others
	// who do not. 1,000 connections can have 8 MiB beyond the budget.
	outputBudget = 8 << 20
	outputShare  = 8 << 10
	// leastUse is how long a connection may be without a whole query before
	// another can have its place, once all are taken: some round trips of a
	// client that has just connected, or is about to ask again.
	leastUse = 100 * time.Millisecond
	// placesTried is how many connections are looked at for such a place. Those
	// who hold all places hold most of any few.
	placesTried = 16
)

// conns is the table of TCP connections: who has how many, how long they may
// idle, and how much output is held for them.
type conns struct {
	output atomic.Int64 // octets not yet written
	// working has an element for each connection at work on a query, half as
	// many as there are CPUs. Of those who can run, the scheduler lets each in
	// turn, and UDP readers are but a few among hundreds of connections.
	working chan struct{}

	mu        sync.Mutex
	limits    Limits
	open      map[*tcpConn]*Endpoint
	perClient map[netip.Addr]int
	hurried   time.Time // when idle connections were last told to make room
}

// admit enters a new connection, or says why not.
func (c *conns) admit(t *tcpConn, ep *Endpoint) (Shed, bool) {
	client := t.peer.Addr()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.perClient[client] >= c.limits.ConnsPerClient:
		return ShedConnsPer, false
	case len(c.open) >= c.limits.Conns && !c.evict():
		return ShedConns, false
	}
	c.open[t] = ep
	c.perClient[client]++
	if c.crowded() && time.Since(c.hurried) >= idleCrowded {
		c.hurried = time.Now()
		for o := range c.open {
			o.makeRoom()
		}
	}
	return 0, true
}

// crowded reports whether more than three quarters of the connections are taken;
// the caller holds mu.
func (c *conns) crowded() bool { return len(c.open) > c.limits.Conns*3/4 }

// evict gives up the connection that has been of no use for the longest time, of
// some, and reports whether there was one: whoever sends queries octet by octet, or
// none, from many addresses, does not keep others from asking. The caller holds mu.
func (c *conns) evict() bool {
	var longest *tcpConn
	var since time.Time
	now, tried := time.Now(), 0
	for t := range c.open { // in random order
		if s, ok := t.useless(now); ok && (longest == nil || s.Before(since)) {
			longest, since = t, s
		}
		if tried++; tried == placesTried {
			break
		}
	}
	if longest == nil {
		return false
	}
	c.forget(longest)
	longest.s.c.shed[ShedConns].Add(1)
	longest.giveUp()
	return true
}

// remove takes a connection out.
func (c *conns) remove(t *tcpConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(t)
}

// forget takes a connection out, once; the caller holds mu.
func (c *conns) forget(t *tcpConn) {
	if _, ok := c.open[t]; !ok {
		return
	}
	client := t.peer.Addr()
	delete(c.open, t)
	if c.perClient[client]--; c.perClient[client] == 0 {
		delete(c.perClient, client)
	}
}

// idle returns how long a connection may wait for its next query.
func (c *conns) idle() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.crowded() {
		return idleCrowded
	}
	return idleTimeout
}

// drain tells all connections to end.
func (c *conns) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.open {
		t.startDrain()
	}
}

// each calls do for the connections of some services.
func (c *conns) each(of map[*Endpoint]*service, do func(*tcpConn)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t, ep := range c.open {
		if _, ok := of[ep]; ok {
			do(t)
		}
	}
}

// workPatience is how long a query waits for its turn. One that stands still must
// not hold up all others for ever.
const workPatience = 250 * time.Millisecond

// beginWork waits until the connection may work on a query, and reports whether
// it has to call endWork then.
func (c *conns) beginWork() bool {
	select {
	case c.working <- struct{}{}:
		return true
	default:
	}
	t := time.NewTimer(workPatience)
	defer t.Stop()
	select {
	case c.working <- struct{}{}:
		return true
	case <-t.C:
		return false
	}
}

// endWork says that the work is done.
func (c *conns) endWork() { <-c.working }

// reserve takes n octets of the output budget for a connection that has own
// octets already, if there are as many.
func (c *conns) reserve(n, own int) bool {
	if c.output.Add(int64(n)) > outputBudget && own+n > outputShare {
		c.unreserve(n)
		return false
	}
	return true
}

// unreserve gives n octets back.
func (c *conns) unreserve(n int) { c.output.Add(int64(-n)) }
