package upstream

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// grace is how much longer than the longest exchange a socket waits for late
// answers.
const grace = 50 * time.Millisecond

// conn is one socket to a server, with its own ids. Its run goroutine owns it:
// it dials, reads and closes; a TCP connection has a writer beside it.
//
//	pooled -> retired (takes no more questions) -> closed (when no answer is
//	due any more, or could come)
type conn struct {
	srv *server
	tr  Transport

	// All below is guarded by srv.mu. nc and raw do not change once set.
	nc      net.Conn        // nil while dialing
	raw     syscall.RawConn // nil if nc is no UDP socket of the kernel
	quotes  bool            // ICMP errors say which datagrams they are about
	local   netip.AddrPort
	out     []byte        // questions that wait for the dial or the writer, each after its length
	kick    chan struct{} // wakes the writer; TCP only
	timer   *time.Timer   // of expire
	until   time.Duration // takes questions until
	entries map[uint16]entry
	live    int // entries that somebody waits for
	sent    int
	last    time.Duration // last question
	heard   time.Duration // last answer
	// silent questions have been sent since silentSince without an answer to
	// any question.
	silent      int
	silentSince time.Duration
	rebuffed    time.Duration // last ICMP error that did not end it
	rebuffs     int           // in a row, see maxRebuffs
	pooled      bool
	retired     bool
	closed      bool
}

// entry is what an answer's id leads to.
type entry struct {
	x    *exchange // nil once nobody waits: the answer, if it comes, is late
	i    uint8     // of its attempts
	told uint8     // news that its exchange has had, a bit each
	nth  uint32    // question of the socket
	sent time.Duration
}

func newConn(s *server, t Transport, now time.Duration, pooled bool) *conn {
	c := &conn{srv: s, tr: t, entries: make(map[uint16]entry), heard: never, rebuffed: never, pooled: pooled, last: now}
	if t == TCP {
		c.kick = make(chan struct{}, 1)
		c.until = now + tcpAge - s.jitter(tcpAgeJitter)
	} else {
		c.until = now + udpAge - s.jitter(udpAgeJitter)
	}
	c.timer = time.AfterFunc(c.next(now)-now, c.expire)
	return c
}

// takes reports whether the socket takes questions from the pool.
func (c *conn) takes(now time.Duration) bool { return c.pooled && !c.retired && !c.spent(now) }

// spent reports whether the socket has served its time. A UDP socket is retired
// then, a TCP connection when there is another or it has been idle: if there is
// no other to be had, it serves on.
func (c *conn) spent(now time.Duration) bool {
	return now >= c.until || c.tr == TCP && c.sent >= tcpQuestions
}

// retire ends the taking of questions; the caller holds srv.mu.
func (c *conn) retire() {
	if c.retired {
		return
	}
	c.retired = true
	now := c.srv.f.now()
	c.timer.Reset(c.next(now) - now)
}

// done reports whether the socket has nothing left to wait for.
func (c *conn) done() bool { return c.retired && len(c.entries) == 0 }

// end returns when to close the socket as things stand.
func (c *conn) end(now time.Duration) time.Duration {
	switch {
	case c.done():
		return now
	case c.retired:
		return c.last + c.srv.f.config.Timeouts.Total + grace
	case c.tr == TCP && c.live == 0:
		return max(c.last, c.heard) + tcpIdle
	}
	return now + tcpIdle
}

// next returns when expire has something to do.
func (c *conn) next(now time.Duration) time.Duration {
	if c.retired {
		return c.end(now)
	}
	if c.tr == TCP {
		return c.end(now)
	}
	return min(c.end(now), c.until)
}

// expire is called by the timer: at the end of the pooled life, of the idle
// time, and of the wait for late answers.
func (c *conn) expire() {
	s := c.srv
	s.mu.Lock()
	now := s.f.now()
	switch {
	case now < c.until || c.retired || c.tr == TCP:
	case c.heard != never && s.pools[c.tr].troubled(now):
		c.until = now + spacing // no other is to be had
	default:
		c.retired = true
	}
	over := now >= c.end(now)
	if !over && !c.closed {
		c.timer.Reset(c.next(now) - now)
	}
	s.unlock()
	if over {
		c.close(errMovedOn)
	}
}

// run is the goroutine that owns the socket.
func (c *conn) run() {
	f := c.srv.f
	defer f.running.Done()
	ctx, cancel := context.WithTimeout(f.ctx, f.config.Timeouts.Total)
	nc, err := f.config.Dial(ctx, c.tr.String(), c.srv.addr)
	cancel()
	if err != nil {
		c.close(err)
		return
	}
	if !c.opened(nc) {
		_ = nc.Close()
		return
	}
	switch {
	case c.tr == TCP:
		err = c.readStream()
	case c.raw != nil:
		err = c.readBatches()
	default:
		err = c.readDatagrams()
	}
	c.close(err)
}

// opened notes that the socket is connected and lets go what waited for that.
// It reports whether the socket is still wanted.
func (c *conn) opened(nc net.Conn) bool {
	s := c.srv
	s.mu.Lock()
	if c.closed {
		s.unlock()
		return false
	}
	c.nc = nc
	if a, ok := nc.LocalAddr().(interface{ AddrPort() netip.AddrPort }); ok {
		c.local = a.AddrPort()
	}
	if c.tr == TCP {
		for _, o := range s.pools[TCP].conns {
			if o.spent(s.f.now()) {
				o.retire()
			}
		}
		s.f.running.Add(1)
		go c.writeStream()
		s.unlock()
		return true
	}
	if u, ok := nc.(*net.UDPConn); ok {
		c.raw, _ = u.SyscallConn() // fails only for a nil conn
		c.quotes = wantQuotes(c.raw)
	}
	out := c.out
	c.out = nil
	s.unlock()
	for len(out) > 0 {
		n := 2 + int(binary.BigEndian.Uint16(out))
		var err error
		for range maxSends {
			if _, err = nc.Write(out[2:n]); err == nil || !c.aboutOthers(err) {
				break
			}
		}
		if err != nil && !c.unsent(dnswire.ID(out[2:n]), err) {
			break
		}
		out = out[n:]
	}
	return true
}

// newID returns an id that no answer on its way may have; the caller holds
// srv.mu.
func (c *conn) newID() uint16 {
	for {
		id := uint16(c.srv.rng.Uint64()) //nolint:gosec // the low bits are as random
		if _, used := c.entries[id]; !used {
			return id
		}
	}
}

// enter notes that an answer is waited for; the caller holds srv.mu.
func (c *conn) enter(id uint16, e entry) {
	e.nth = uint32(c.sent) //nolint:gosec // not so many
	c.entries[id] = e
	c.live++
	c.sent++
	c.last = e.sent
	if c.silent == 0 {
		c.silentSince = e.sent
	}
	c.silent++
	if c.sent%udpQuestions != 0 {
		return
	}
	c.forgetLate(e.sent)
	if c.tr == UDP && c.sent == udpQuestions {
		c.retire()
	}
}

// forgetLate gives the ids of answers free that come no more. A socket that serves on
// for want of another would run out of them; the caller holds srv.mu.
func (c *conn) forgetLate(now time.Duration) {
	for id, e := range c.entries {
		if e.x == nil && now-e.sent > c.srv.f.config.Timeouts.Total+grace {
			delete(c.entries, id)
		}
	}
}

// enqueue appends a question to those that wait for the dial or the writer; the
// caller holds srv.mu.
func (c *conn) enqueue(msg []byte) {
	c.out = binary.BigEndian.AppendUint16(c.out, uint16(len(msg))) //nolint:gosec // a question has at most 283 octets
	c.out = append(c.out, msg...)
	if c.kick != nil {
		select {
		case c.kick <- struct{}{}:
		default:
		}
	}
}

// close closes the socket. Whoever still waits on it gets err.
func (c *conn) close(err error) {
	s := c.srv
	s.mu.Lock()
	if c.closed {
		s.unlock()
		return
	}
	c.closed = true
	c.retired = true
	c.timer.Stop()
	s.pools[c.tr].remove(c)
	var waiting []entry
	for _, e := range c.entries {
		if e.x != nil {
			waiting = append(waiting, e)
		}
	}
	clear(c.entries)
	c.live = 0
	if len(waiting) > 0 && !errors.Is(err, errClosed) {
		c.charge(waiting, err)
	}
	if c.heard == never && c.rebuffed == never && errors.Is(err, errMovedOn) {
		s.pools[c.tr].wary = s.f.now() + wariness
	}
	if c.kick != nil {
		close(c.kick)
	}
	nc := c.nc
	s.unlock()
	if nc != nil {
		_ = nc.Close()
	}
	for _, e := range waiting {
		e.x.at(int(e.i)).err = err
		e.x.events <- event{attempt: e.i, what: failed}
	}
}

// charge counts what a socket's failure means to those who wait: a strike
// against its path, by one of their questions, if the path has answered nothing
// since. That there was no socket to be had is trouble of this machine, and the
// path's no more. The caller holds srv.mu.
func (c *conn) charge(waiting []entry, err error) {
	s := c.srv
	p := &s.paths[c.tr]
	if c.nc == nil && IsLocal(err) {
		p.failures[Local] += uint64(len(waiting))
		s.pools[c.tr].trouble = s.f.now() + troubleTime
		return
	}
	p.failures[Network] += uint64(len(waiting))
	if p.heard >= c.silentSince {
		return
	}
	for _, e := range waiting {
		if !e.x.at(int(e.i)).extra() {
			s.strike(e.x, c.tr, false)
			return
		}
	}
}

// survives reports whether the socket is of use in spite of an ICMP error that does
// not say which datagram it is about: where questions are under way that are older than its last answer,
// somebody listens there, and the error is about one datagram (a rule that
// rejects some). After a second one without an answer between them it takes no
// more questions, and those under way are told: but for some, they have been
// received, and their answers are still welcome.
func (c *conn) survives() bool {
	s := c.srv
	s.mu.Lock()
	defer s.unlock()
	if c.closed || c.tr != UDP {
		return false
	}
	for _, e := range c.entries {
		if e.x == nil || e.sent >= c.heard {
			continue
		}
		if c.rebuffed >= c.heard {
			c.retire()
			c.tellAll(socketRefused)
		}
		c.rebuffed = s.f.now()
		s.paths[c.tr].failures[Network]++
		return true
	}
	return false
}

// tell sends news about the socket to whoever waits for the answer with the id,
// once. It reports whether it did; the caller holds srv.mu.
func (c *conn) tell(id uint16, n news) bool {
	e := c.entries[id]
	if e.x == nil || e.told&(1<<n) != 0 {
		return false
	}
	e.told |= 1 << n
	c.entries[id] = e
	e.x.events <- event{attempt: e.i, what: n}
	return true
}

// tellAll sends news to everybody who waits and returns to how many of them it
// was news; the caller holds srv.mu.
func (c *conn) tellAll(n news) (told int) {
	for id := range c.entries {
		if c.tell(id, n) {
			told++
		}
	}
	return told
}

// forget ends the wait of an attempt: its answer, if it still comes, is late.
// It reports false if the answer is being delivered: then its event will come.
func (c *conn) forget(x *exchange, i uint8, now time.Duration) bool {
	s := c.srv
	s.mu.Lock()
	defer s.unlock()
	a := x.at(int(i))
	e, ok := c.entries[a.id]
	if !ok || e.x != x || e.i != i {
		return false
	}
	c.entries[a.id] = entry{sent: e.sent}
	c.live--
	p, age := &s.paths[c.tr], now-a.sent
	if c.heard < a.sent && (age >= silence || age >= minHedge && p.heard > a.sent) {
		c.retire()
	}
	if age >= silence {
		if a.unsent == nil {
			p.failures[Timeout]++
		}
		if p.heard < a.sent && !a.extra() {
			s.strike(x, c.tr, false)
		}
	}
	return true
}
