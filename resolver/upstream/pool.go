package upstream

import (
	"slices"
	"time"
)

const (
	// maxPooled is how many sockets per server and transport take questions
	// at a time.
	maxPooled = 4
	// maxConns bounds all sockets per server and transport, those of second
	// questions and those that are only waiting for late answers included.
	maxConns = 64
	// spacing is how often a new UDP socket joins the pool at most: two new
	// conntrack entries a second (30 s each), and two rolls of kube-proxy's
	// dice.
	spacing = 500 * time.Millisecond
	// wariness is how long after a new socket that led nowhere no other is
	// opened beside one that has answered.
	wariness = time.Minute
	// A UDP socket takes questions for less than 2 s after its first: a
	// packet later than that turns its conntrack entry from 30 s into an
	// ASSURED one of 120 s (kernel, nf_conntrack_proto_udp.c).
	udpAge       = 1800 * time.Millisecond
	udpAgeJitter = 300 * time.Millisecond
	// udpQuestions bounds the ids that one socket's late answers can take.
	udpQuestions = 8192
	// A TCP connection takes questions for at most 30 s, so that a new one
	// finds the endpoints of the day (unbound's tcp-reuse: 200 questions).
	tcpAge       = 30 * time.Second
	tcpAgeJitter = 10 * time.Second
	tcpQuestions = 200
	// tcpIdle is below the idle limits of servers (CoreDNS: 10 s), so that a
	// question seldom meets the server's close.
	tcpIdle = 5 * time.Second
	// tcpCrowd is how many questions share a connection before the pool
	// grows: pipelining is cheaper than a handshake.
	tcpCrowd = 32
	// stuckQuestions in a row without an answer, while other sockets get
	// answers, mean that a socket leads nowhere. An endpoint that drops half
	// of all packets looks like that once in 256 times.
	stuckQuestions = 8
	// troubleTime is how long after a socket was not to be had for want of
	// something on this machine none is opened beside those that there are:
	// longer than spacing, so that a busy pool sees that the trouble lasts.
	troubleTime = time.Second
)

// pool is the sockets to one server over one transport, guarded by server.mu.
type pool struct {
	conns  []*conn // open, the oldest first
	opened time.Duration
	wary   time.Duration // until
	// trouble lasts until then: sockets are not to be had, see IsLocal.
	trouble time.Duration
	turn    int
}

// troubled reports whether sockets are not to be had at the moment.
func (p *pool) troubled(now time.Duration) bool { return now < p.trouble }

// pick returns the socket for the next question, opening one if it must or if
// it is time to; nil if there are too many. fresh asks for a new socket.
//
// A socket that has not answered yet may lead to a dead endpoint: it gets one
// question to try, the rest go to sockets that have answered. Only while there
// are none of those (after a start) do several questions share untried ones.
func (s *server) pick(t Transport, now time.Duration, k attemptKind, fresh bool) *conn {
	p := &s.pools[t]
	if fresh {
		limit := maxConns
		if k != confirming {
			limit /= 2 // half of what may be open is kept for first questions
		}
		return s.open(t, now, false, limit)
	}
	var best *conn
	pooled, tried := 0, false
	p.turn++
	for i := range p.conns {
		c := p.conns[(i+p.turn)%len(p.conns)]
		if !c.takes(now) {
			continue
		}
		stuck := s.stuck(c, now)
		if !stuck {
			pooled++
		}
		ok := c.heard != never && !stuck && c.rebuffed <= c.heard
		if best == nil || ok && !tried || ok == tried && c.live < best.live {
			best, tried = c, ok
		}
	}
	if best == nil && p.troubled(now) {
		best = p.last()
	}
	grow := best == nil
	switch {
	case pooled >= maxPooled || best != nil && p.troubled(now):
	case t == UDP:
		grow = grow || !tried || now-p.opened >= spacing && now >= p.wary
	default:
		grow = grow || best.live >= tcpCrowd
	}
	if grow {
		if c := s.open(t, now, true, maxConns); c != nil {
			return c
		}
	}
	return best
}

// last returns the socket that has answered last, though it take no more
// questions, for want of another; or nil.
func (p *pool) last() *conn {
	var best *conn
	for _, c := range p.conns {
		if c.nc != nil && c.heard != never && (best == nil || c.heard > best.heard) {
			best = c
		}
	}
	return best
}

// open opens a socket; nil if there are as many as the limit.
func (s *server) open(t Transport, now time.Duration, pooled bool, limit int) *conn {
	p := &s.pools[t]
	if len(p.conns) >= limit || s.f.closed.Load() {
		return nil
	}
	c := newConn(s, t, now, pooled)
	s.paths[t].opened++
	p.conns = append(p.conns, c)
	if pooled {
		p.opened = now
	}
	s.f.running.Add(1)
	go c.run()
	return c
}

// promote lets a socket that was opened for one second question, and proved
// itself, take others, if there is room.
func (s *server) promote(c *conn, now time.Duration) {
	if c.pooled || c.retired {
		return
	}
	pooled := 0
	for _, o := range s.pools[c.tr].conns {
		if o.takes(now) && !s.stuck(o, now) {
			pooled++
		}
	}
	if c.pooled = pooled < maxPooled; !c.pooled {
		c.retire()
	}
}

// stuck reports whether the socket gets no answers while others of its path do.
func (s *server) stuck(c *conn, now time.Duration) bool {
	return c.silent >= stuckQuestions && now-c.silentSince >= minHedge && s.paths[c.tr].heard > c.silentSince
}

// abandon retires the attempt's socket if it is stuck, and tells the others who
// wait on it, as many as may be told, to ask again. It returns how many it told.
func (s *server) abandon(a *attempt, now time.Duration, most int) int {
	s.mu.Lock()
	defer s.unlock()
	c := a.conn
	if c.closed || c.retired || !s.stuck(c, now) || s.paths[c.tr].overdue[Hedge] > mostly {
		return 0
	}
	c.retire()
	told := 0
	for id, e := range c.entries {
		if told < most && id != a.id && e.sent >= c.silentSince && c.tell(id, socketRetired) {
			told++
		}
	}
	return told
}

// remove takes a closed socket out of its pool.
func (p *pool) remove(c *conn) {
	if i := slices.Index(p.conns, c); i >= 0 {
		p.conns = slices.Delete(p.conns, i, i+1)
	}
}
