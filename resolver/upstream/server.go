package upstream

import (
	crand "crypto/rand"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Health is whether a server answers over a transport.
type Health struct {
	Server    netip.AddrPort
	Transport Transport
	Up        bool
}

// server is one address that questions are forwarded to, shared by all routes
// that name it: its sockets, what we know of it, and the one lock for both.
type server struct {
	f    *Forwarder
	addr netip.AddrPort

	mu    sync.Mutex
	paths [numTransports]path
	pools [numTransports]pool
	edns  ednsMemory
	known known
	rng   *rand.ChaCha8 // ids and jitter: seeded from the system, not to be guessed
	news  []Health      // told by unlock
}

func newServer(f *Forwarder, addr netip.AddrPort) *server {
	var seed [32]byte
	_, _ = crand.Read(seed[:]) // never fails
	s := &server{f: f, addr: addr, rng: rand.NewChaCha8(seed), edns: ednsMemory{heard: never}}
	for t := range s.paths {
		p := &s.paths[t]
		p.heard, p.well, p.confirmed = never, never, never
		s.pools[t].opened = never
	}
	return s
}

// never is an instant before all others.
const never time.Duration = -1 << 62

// unlock releases mu and then tells what happened to the server's health.
func (s *server) unlock() {
	news := s.news
	s.news = nil
	s.mu.Unlock()
	if s.f.config.OnHealth != nil {
		for _, h := range news {
			s.f.config.OnHealth(h)
		}
	}
}

// jitter returns a random share of d; the caller holds mu.
func (s *server) jitter(d time.Duration) time.Duration {
	return time.Duration(s.rng.Uint64() % uint64(max(d, 1)))
}

// claim reserves the next trial of a path that is down, or the first of
// several that are. It reports whether the caller is to make it.
func (s *server) claim(t Transport, now time.Duration, anyway bool) bool {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	if !p.due(now) && !anyway {
		return false
	}
	p.putOff(now, s.jitter)
	p.trials++
	return true
}

// plainTrial reports whether the present trial of a path that is down goes without
// an OPT record, for a server that has begun to drop those.
func (s *server) plainTrial(t Transport) bool {
	s.mu.Lock()
	defer s.unlock()
	return s.paths[t].trials%4 == 3
}

// strike counts that an exchange got no answer over a path, or an error where
// another server had an answer. If that is enough to doubt the path, it is found
// out. The caller holds mu, and keeps the exchange from ending meanwhile.
func (s *server) strike(x *exchange, t Transport, broken bool) {
	p := &s.paths[t]
	l := &p.silent
	if broken {
		l = &p.broken
	}
	if !p.down.Load() && l.add(x.hash, x.start) {
		s.startConfirmation(x.route, t, broken, maxConfirm)
	}
}

// takeDown declares a path down. Everybody who waits on it is told: packets to a
// dead server load nobody, so a question that moves to the next one costs that
// one no more than its share. The caller holds mu.
func (s *server) takeDown(t Transport, now time.Duration) {
	if s.paths[t].down.Swap(true) {
		return
	}
	s.paths[t].backoff = 0
	s.paths[t].putOff(now, s.jitter)
	s.news = append(s.news, Health{Server: s.addr, Transport: t})
	for _, c := range s.pools[t].conns {
		c.tellAll(pathDown)
	}
}

// good counts a usable answer; the caller holds mu.
func (s *server) good(t Transport) {
	if s.paths[t].good() {
		s.news = append(s.news, Health{Server: s.addr, Transport: t, Up: true})
	}
}

// blame counts an error answer to a question that another server could answer.
func (s *server) blame(x *exchange, t Transport) {
	s.mu.Lock()
	defer s.unlock()
	s.strike(x, t, true)
}

// suspect counts that an attempt is unanswered after so long that this says
// something about its path, if nothing else was answered since.
func (s *server) suspect(x *exchange, a *attempt) {
	s.mu.Lock()
	defer s.unlock()
	if s.paths[a.tr].heard < a.sent {
		s.strike(x, a.tr, false)
	}
}

// outdo counts that another server had data for what this one had no answer to.
func (s *server) outdo(x *exchange, a *attempt) {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[a.tr]
	p.outdone++
	p.scouts++
	if a.waiting && p.heard < a.sent { // it may have died since
		s.strike(x, a.tr, false)
	}
}

// outdone reports whether a question that the path lets wait goes to the next
// server at once. The path works, and yet answers nothing that others have data
// for: a resolver cut off from the world that knows what it has cached.
func (s *server) outdone(t Transport) bool {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	switch {
	case !p.vouched:
		return false
	case p.outdone >= maxStrikes:
		return true
	case p.scouts > 0:
		p.scouts--
		return true
	}
	return false
}

// overdue counts that x is still unanswered when it is time for a second
// question of that kind.
func (s *server) overdue(x *exchange, k Kind) {
	s.mu.Lock()
	defer s.unlock()
	if !x.judged {
		x.late[k] = true
		s.paths[x.at(0).tr].overdue[k].add(true)
	}
}

// judge counts that x was answered, before it was time for the kinds of second
// questions that overdue did not count. The caller holds mu.
func (s *server) judge(x *exchange) {
	if x.at(0).srv != s || x.judged {
		return
	}
	x.judged = true
	for k := range x.late {
		if !x.late[k] {
			s.paths[x.at(0).tr].overdue[k].add(false)
		}
	}
}

// fruitful reports whether a second question can help on this path: not while
// most of the recent first ones were unanswered as long.
func (s *server) fruitful(t Transport, k Kind) bool {
	s.mu.Lock()
	defer s.unlock()
	return s.paths[t].overdue[k] <= mostly
}

// silentSince reports whether the path has given no answer since the instant.
func (s *server) silentSince(t Transport, since time.Duration) bool {
	s.mu.Lock()
	defer s.unlock()
	return s.paths[t].heard < since
}

// countFallback counts a truncated answer that is asked for again over TCP.
func (s *server) countFallback() {
	s.mu.Lock()
	defer s.unlock()
	s.paths[UDP].fallbacks++
}

// idle reports whether the server has no socket open.
func (s *server) idle() bool {
	s.mu.Lock()
	defer s.unlock()
	return len(s.pools[UDP].conns)+len(s.pools[TCP].conns) == 0
}
