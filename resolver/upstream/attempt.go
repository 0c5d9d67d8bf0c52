package upstream

import (
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// maxAttempts bounds what one exchange can ever send: the first, a hedge, a
// retry, two resends, and what TC, OPT, other servers and probes ask for.
const maxAttempts = 10

// attempt is one sending of an exchange's question.
type attempt struct {
	srv   *server
	index int // of srv in the exchange's servers
	tr    Transport
	kind  attemptKind
	sent  time.Duration
	// waiting lasts until the event answered or failed.
	waiting bool

	// Guarded by srv.mu while waiting.
	conn    *conn
	id      uint16
	edns    bool
	garbled bool // got a malformed message under its id
	failure bool // the answer is an error or a referral

	// Set by the sender of the event before it.
	cut      bool // the answer has TC; there is no msg
	msg      []byte
	response dnswire.Response
	err      error
}

// attemptKind says why a question is sent.
type attemptKind uint8

const (
	first  attemptKind = iota
	hedged             // no answer yet
	retried
	resent   // nobody received it, or its socket or server was given up
	followed // as the answer asks for: over TCP, without OPT, from another server
	probed   // a copy, to see whether a path that is down works again
	numAttemptKinds
)

// ask sends the question to a server. fresh asks for a new socket. It reports
// whether it could.
func (x *exchange) ask(index int, t Transport, k attemptKind, fresh bool) bool {
	if x.n == maxAttempts {
		return false
	}
	s := x.servers[index]
	a := &x.attempts[x.n]
	*a = attempt{srv: s, index: index, tr: t, kind: k, sent: x.f.now(), waiting: true}
	s.mu.Lock()
	c := s.pick(t, a.sent, fresh)
	if c == nil {
		s.unlock()
		x.lastErr = errSockets
		return false
	}
	a.conn, a.id = c, c.newID()
	a.edns = x.offersOPT(a)
	c.enter(a.id, entry{x: x, i: uint8(x.n), sent: a.sent}) //nolint:gosec // below maxAttempts
	p := &s.paths[t]
	p.queries[k]++
	if k != probed {
		x.tried |= 1 << index
		x.hedgeAt = a.sent + x.f.config.Timeouts.Hedge
		if x.f.config.Timeouts.Hedge == 0 {
			x.hedgeAt = a.sent + p.hedgeDelay()
		}
	}
	x.n++
	msg := x.message(a.id, a.edns)
	now := t == UDP && c.nc != nil
	if !now {
		c.enqueue(msg)
	}
	s.unlock()
	if now {
		c.send(x, msg)
	}
	return true
}

// wasGarbled reports whether a malformed message came under the attempt's id.
func (a *attempt) wasGarbled() bool {
	a.srv.mu.Lock()
	defer a.srv.mu.Unlock()
	return a.garbled
}
