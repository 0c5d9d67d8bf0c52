package upstream

import (
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

const (
	// ednsRetry is how long a server is spared OPT records that it choked on.
	ednsRetry = 15 * time.Minute
	// ednsTrust is how long an answer to a question with an OPT record
	// proves that such questions arrive.
	ednsTrust = 30 * time.Second
	// ednsSuspicion is how many questions in a row must go unanswered with an
	// OPT record and be answered without. Two are what two lost packets look
	// like.
	ednsSuspicion = 3
	// ednsPause is how long at first a server is spared OPT records that answers
	// such errors whether there is one or not. That says less than an answer
	// without one, and most such servers only have to be restarted: each time in a
	// row it is twice as long, up to ednsRetry.
	ednsPause = time.Minute
)

// ednsMemory is what we know of a server's dealing with OPT records, guarded by
// server.mu. One without EDNS should answer FORMERR (RFC 6891 section 7); some
// answer NOTIMP or BADVERS, or not at all. Section 6.2.2 allows to remember.
type ednsMemory struct {
	off     time.Duration // no OPT before this instant
	heard   time.Duration // last answer to a question with OPT
	suspect int
	// vain counts the questions in a row that got such an error with an OPT record
	// and without, and pause is how long OPT records were left out for those.
	vain  int
	pause time.Duration
}

// trusted reports whether the server has shown lately that it takes OPT records.
func (e *ednsMemory) trusted(now time.Duration) bool { return now-e.heard <= ednsTrust }

// chokes reports whether the rcode may be about the OPT record.
func chokes(rcode uint16) bool {
	return rcode == dnswire.RcodeFormErr || rcode == dnswire.RcodeNotImp || rcode == dnswire.RcodeBadVers
}

// spareOPT sends the server no OPT records for about so long; the caller holds mu.
func (s *server) spareOPT(now, length time.Duration) {
	s.edns.suspect = 0
	s.edns.off = now + length - s.jitter(length/8)
}

// tookOPT notes an answer to a question with an OPT record that is not about it;
// the caller holds mu.
func (s *server) tookOPT(now time.Duration) {
	s.edns.heard, s.edns.suspect = now, 0
	s.edns.vain, s.edns.pause = 0, 0
}

// offersOPT reports whether the attempt carries an OPT record. Where it is not
// known whether the server takes them, a second question goes without: answers
// to those alone are how a server shows that it drops the others. The caller
// holds srv.mu.
func (x *exchange) offersOPT(a *attempt) bool {
	e := &a.srv.edns
	switch {
	case x.plain || a.sent < e.off:
		return false
	case a.kind == hedged || a.kind == retried:
		return x.do || a.srv != x.at(0).srv || e.trusted(a.sent)
	}
	return true
}

// learnOPT draws the conclusion from a usable answer to a question without OPT.
func (x *exchange) learnOPT(a *attempt) {
	if a.edns || a.got.response.Rcode != dnswire.RcodeNoError && a.got.response.Rcode != dnswire.RcodeNXDomain {
		return
	}
	for i := range x.n {
		b := x.at(i)
		if b.srv != a.srv {
			continue
		}
		if refused := !b.waiting && b.got != nil && chokes(b.got.response.Rcode); refused || b.waiting {
			if a.srv.withoutOPT(b, refused, x.f.now()) {
				return
			}
		}
	}
}

// withoutOPT counts that the server answered without OPT what it refused, or so
// far did not answer, as attempt b. It reports false if b had no OPT either.
//
// A refusal by a server that is trusted with OPT records is about the name: a
// forwarder passes on what the servers of one domain make of them, and whoever runs
// those is not to decide what all others get.
func (s *server) withoutOPT(b *attempt, refused bool, now time.Duration) bool {
	s.mu.Lock()
	defer s.unlock()
	if !b.edns {
		return false
	}
	if refused && s.edns.trusted(now) {
		return true
	}
	if s.edns.suspect++; refused || s.edns.suspect >= ednsSuspicion {
		s.spareOPT(now, ednsRetry)
	}
	return true
}

// learnVain draws the conclusion from an error to a question without OPT, where
// the same server had one for it with OPT: after a few in a row, questions to that
// server are not asked both ways any more. Without OPT, since a server that
// recovers as one without EDNS answers then as well.
func (x *exchange) learnVain(a *attempt) {
	if a.edns || !chokes(a.got.response.Rcode) {
		return
	}
	for i := range x.n {
		if b := x.at(i); b.srv == a.srv && !b.waiting && b.edns && b.got != nil && chokes(b.got.response.Rcode) {
			a.srv.inVain(x.f.now())
			return
		}
	}
}

// inVain counts that a question got an error with an OPT record and without. As with
// withoutOPT, it may be about the question: some servers have FORMERR for types that
// they do not know, for which anybody can ask.
func (s *server) inVain(now time.Duration) {
	s.mu.Lock()
	defer s.unlock()
	e := &s.edns
	if e.vain++; e.vain >= ednsSuspicion && now >= e.off && !e.trusted(now) {
		e.pause = min(max(2*e.pause, ednsPause), ednsRetry)
		s.spareOPT(now, e.pause)
	}
}

// chokesAnyway reports whether it is of little use to ask the server without an OPT
// record what it has refused with one: so far it has refused that as well.
func (s *server) chokesAnyway() bool {
	s.mu.Lock()
	defer s.unlock()
	return s.edns.vain >= ednsSuspicion
}
