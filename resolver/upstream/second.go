package upstream

import (
	"errors"
	"time"
)

// maxResends bounds how often a question that nobody received is sent again
// (RFC 9520 section 3.1: no more than three sends).
const maxResends = 2

// untried returns the first path, in order of preference, that is up and leads
// to a server that was not asked yet; index -1 if there is none. TCP, where the
// protocol is Auto, comes after UDP of all servers: mostly it is the server that
// is down and not its UDP.
func (x *exchange) untried() (index int, t Transport) {
	for t, to := x.transports(); t <= to; t++ {
		for i, s := range x.servers {
			if x.tried&(1<<i) == 0 && !s.paths[t].down.Load() {
				return i, t
			}
		}
	}
	return -1, 0
}

// askFirst asks over the first path that is up. Paths to that server and those
// before it that are down get a copy of the question now and then: nothing waits
// for them, and their answer, should it come, brings them up. Where all are
// down, the one whose trial is due first is asked.
func (x *exchange) askFirst() {
	x.route.budget.earn()
	now := x.f.now()
	i, t := x.untried()
	hopeless := i < 0
	if hopeless {
		i, t = x.leastHopeless()
		x.servers[i].claim(t, now, true)
		x.plain = !x.do && x.servers[i].plainTrial(t)
	}
	if !x.ask(i, t, first, false) {
		x.settle()
	}
	if hopeless || x.over {
		return
	}
	for j, s := range x.servers[:i+1] {
		for u, to := x.transports(); u <= to; u++ {
			if s.paths[u].due(now) && s.claim(u, now, false) && !s.startTrial(x.route, u) {
				x.ask(j, u, probed, false)
			}
		}
	}
}

// transports returns the first and the last of the transports that may be used,
// in order of preference; none if the first is after the last.
func (x *exchange) transports() (from, to Transport) {
	from, to = UDP, TCP
	if x.route.protocol == TCPOnly || x.needTCP {
		from = TCP
	}
	if x.route.protocol == UDPOnly {
		to = UDP
	}
	return from, to
}

// leastHopeless returns the path whose trial is due first.
func (x *exchange) leastHopeless() (index int, t Transport) {
	at := int64(1<<63 - 1)
	for i, s := range x.servers {
		for u, to := x.transports(); u <= to; u++ {
			if due := s.paths[u].probeAt.Load(); due < at {
				index, t, at = i, u, due
			}
		}
	}
	return index, t
}

// latest returns the last attempt that an answer is expected from, or nil.
func (x *exchange) latest() *attempt {
	for i := x.n - 1; i >= 0; i-- {
		if a := x.at(i); a.waiting && !a.extra() {
			return a
		}
	}
	return nil
}

// hedge asks the same server again over a new socket: for a ClusterIP, most
// likely another endpoint. If the socket that this question waits on turns out
// to lead nowhere, the others that wait there need not find out by themselves.
func (x *exchange) hedge(now time.Duration) {
	a := x.latest()
	if a == nil {
		return
	}
	x.at(0).srv.overdue(x, Hedge)
	if a.srv.outdone(a.tr) && x.askNext() {
		return
	}
	x.route.budget.spendMany(func(most int) int { return a.srv.abandon(a, now, most) })
	if x.allowed(Hedge, a, int(a.index), a.tr) {
		x.ask(int(a.index), a.tr, hedged, true)
	}
}

// retry asks the next server, or the same over the other transport if this one
// is silent, or else once more over a new socket. What a server is asked first is
// its share of the load and no second question: only the others are charged.
func (x *exchange) retry(now time.Duration) {
	a := x.latest()
	if a == nil {
		return
	}
	x.at(0).srv.overdue(x, Retry)
	if i, t := x.untried(); i >= 0 {
		x.ask(i, t, retried, true)
		return
	}
	i, t := int(a.index), a.tr
	if from, to := x.transports(); from < to && a.srv.silentSince(t, x.start) && !a.srv.paths[t.other()].down.Load() {
		t = t.other()
	}
	if x.allowed(Retry, a, i, t) {
		x.ask(i, t, retried, true)
	}
}

// allowed reports whether the budget lets a second question go, of attempt a,
// to the server at the index over the transport.
func (x *exchange) allowed(k Kind, a *attempt, index int, t Transport) bool {
	s := x.servers[index]
	fruitful := s.fruitful(t, k) && (s != a.srv || s.fruitful(a.tr, k))
	if !x.route.budget.spend(k, fruitful) {
		x.denied = true
		return false
	}
	return true
}

// resend sends a question that nobody received, or whose socket or server was
// given up, again. That is no extra load and not charged.
func (x *exchange) resend(index int, t Transport, fresh bool) bool {
	if x.resends == maxResends {
		return false
	}
	x.resends++
	return x.ask(index, t, resent, fresh)
}

// undelivered acts on an attempt that failed for certain: at once, the next
// server or a new socket.
func (x *exchange) undelivered(a *attempt) {
	if errors.Is(a.err, errClosed) {
		x.fail(Closed, nil)
		return
	}
	if a.extra() {
		return
	}
	x.lastErr = a.err
	if IsLocal(a.err) {
		// Another server's answer would not do, only because this machine
		// is short of something: a socket that there is does.
		if x.latest() == nil && x.resend(int(a.index), a.tr, false) {
			return
		}
		x.settle()
		return
	}
	if i, t := x.untried(); i >= 0 && x.resend(i, t, false) {
		return
	}
	again := !a.srv.paths[a.tr].down.Load()
	if again && a.met {
		// Somebody listens there: what refuses a packet now and then is not to
		// get more of them.
		again = x.latest() == nil && x.resends < maxResends && x.allowed(Retry, a, int(a.index), a.tr)
	}
	if again && x.resend(int(a.index), a.tr, a.tr == TCP) {
		return
	}
	x.settle()
}

// maybeUndelivered acts on an attempt that may have failed: the next server gets
// the question, or the same one, that may have it already, out of the budget.
func (x *exchange) maybeUndelivered(a *attempt) {
	if i, t := x.untried(); i >= 0 {
		x.resend(i, t, false)
	} else if x.resends < maxResends && x.allowed(Retry, a, int(a.index), a.tr) {
		x.resend(int(a.index), a.tr, false)
	}
}

// answered acts on an answer.
func (x *exchange) answered(a *attempt) {
	switch {
	case a.cut:
		x.truncated(a)
	case a.failure && a.extra():
	case a.failure && a.edns && chokes(a.got.response.Rcode):
		x.choked(a)
	case a.failure:
		x.learnVain(a)
		x.refused(a)
	default:
		x.learnOPT(a)
		x.compare(a)
		if x.contradicted(a) {
			x.hold(a)
			return
		}
		x.accept(a)
	}
}

// choked acts on an error that may be about the OPT record: the same server is asked
// without one, once. Another attempt's error, such as a hedge's, is no answer while that
// is under way.
func (x *exchange) choked(a *attempt) {
	if x.needTCP && a.tr == UDP { // there is an answer, and it is asked for over TCP
		x.settle()
		return
	}
	plain := x.lastPlain(a.srv)
	if x.plain && plain != nil {
		if !plain.waiting {
			x.refused(a)
		}
		return
	}
	x.plain = true
	if a.srv.chokesAnyway() && !x.allowed(Retry, a, int(a.index), a.tr) || !x.ask(int(a.index), a.tr, followed, false) {
		x.refused(a)
	}
}

// lastPlain returns the last attempt without an OPT record at a server, or nil.
func (x *exchange) lastPlain(s *server) *attempt {
	for i := x.n - 1; i >= 0; i-- {
		if a := x.at(i); a.srv == s && !a.edns && !a.extra() {
			return a
		}
	}
	return nil
}

// moot reports whether an attempt's error may be about its OPT record, and the same
// server was asked without one: what it says to that is its word.
func (x *exchange) moot(a *attempt) bool {
	return !a.waiting && a.failure && a.edns && chokes(a.got.response.Rcode) && x.lastPlain(a.srv) != nil
}

// refused acts on an error answer: another server may know better.
func (x *exchange) refused(a *attempt) {
	if x.failure == nil {
		x.failure = a
	}
	if a.srv.outdone(a.tr) && x.askNext() {
		return
	}
	if i, t := x.untried(); i >= 0 && x.ask(i, t, followed, false) {
		return
	}
	x.settle()
}

// truncated acts on an answer with TC: the whole answer from the same server
// over TCP, or from the next one if this one's TCP is known not to work.
func (x *exchange) truncated(a *attempt) {
	again := x.needTCP
	x.needTCP = true
	switch {
	case a.tr == TCP || x.route.protocol == UDPOnly:
	case again: // a hedge's TC; TCP is under way
		return
	case !a.srv.paths[TCP].down.Load():
		if x.ask(int(a.index), TCP, followed, false) {
			a.srv.countFallback()
			return
		}
	}
	if i, t := x.untried(); i >= 0 && x.ask(i, t, followed, false) {
		return
	}
	x.settle()
}
