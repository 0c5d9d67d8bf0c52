package upstream

import (
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

const (
	// maxAttempts bounds what one exchange can ever send: the first, a hedge,
	// a retry, two resends, and what TC, OPT, other servers and probes ask for.
	maxAttempts = 10
	// fewAttempts are what nearly all exchanges need at most: a first, a hedge
	// and a retry. Only the others take memory for more.
	fewAttempts = 3
)

// attempt is one sending of an exchange's question.
type attempt struct {
	srv   *server
	sent  time.Duration
	index uint8 // of srv in the exchange's servers
	tr    Transport
	kind  attemptKind
	// waiting lasts until the event answered or failed.
	waiting bool

	// Guarded by srv.mu while waiting.
	edns    bool
	garbled bool // got a malformed message under its id
	failure bool // the answer is an error or a referral
	awaited bool // a confirmation of its path is, or was
	// cut, got and err are set by the sender of the event before it.
	cut  bool // the answer has TC; there is no got
	met  bool // its socket, which failed it alone, has answered others
	id   uint16
	conn *conn
	// unsent is why the kernel did not send the question. For everybody else
	// it is a lost datagram.
	unsent error
	got    *received // nil before an answer
	err    error
}

// received is an answer. Only what is answered takes the memory for it, from a
// pool.
type received struct {
	msg      []byte
	response dnswire.Response
}

// at returns the exchange's attempt i, which is below x.n.
func (x *exchange) at(i int) *attempt {
	if i < fewAttempts {
		return &x.few[i]
	}
	return &x.more[i-fewAttempts]
}

// extra reports whether the attempt is none that the exchange waits for.
func (a *attempt) extra() bool { return a.kind == probed || a.kind == confirming }

// attemptKind says why a question is sent.
type attemptKind uint8

const (
	first  attemptKind = iota
	hedged             // no answer yet
	retried
	resent     // nobody received it, or its socket or server was given up
	followed   // as the answer asks for: over TCP, without OPT, from another server
	probed     // a copy, to see whether a path that is down works again
	confirming // a question known to be answerable, before a path is declared down
	numAttemptKinds
)

// ask sends the question to a server. fresh asks for a new socket. It reports
// whether it could.
func (x *exchange) ask(index int, t Transport, k attemptKind, fresh bool) bool {
	if x.n == maxAttempts {
		return false
	}
	if x.n == fewAttempts {
		x.more = new([maxAttempts - fewAttempts]attempt)
	}
	s := x.servers[index]
	a := x.at(x.n)
	*a = attempt{srv: s, index: uint8(index), tr: t, kind: k, sent: x.f.now(), waiting: true} //nolint:gosec // below maxServers
	s.mu.Lock()
	c := s.pick(t, a.sent, k, fresh)
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
	if !a.extra() {
		x.tried |= 1 << index
		x.suspectAt, x.suspected = a.sent+silence, false
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
		c.send(x, a.id, msg)
	}
	return true
}

// fate returns whether a malformed message came under the attempt's id, and why
// its question was not sent, if it was not.
func (a *attempt) fate() (garbled bool, unsent error) {
	a.srv.mu.Lock()
	defer a.srv.mu.Unlock()
	return a.garbled, a.unsent
}
