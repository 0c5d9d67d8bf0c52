package upstream

import (
	"slices"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// rcodeNotAuth is the response code NOTAUTH (RFC 1035 has none; RFC 8945).
const rcodeNotAuth = 9

// isDenial reports whether a good answer has no data.
func (a *attempt) isDenial() bool {
	return a.got.response.Classify(a.got.msg).Kind != dnswire.Positive
}

// isForeign reports whether an error answer says that the question is not the
// server's to answer, rather than that it has trouble with it.
func (a *attempt) isForeign() bool {
	switch a.got.response.Rcode {
	case dnswire.RcodeNoError, dnswire.RcodeRefused, rcodeNotAuth:
		return true
	}
	return false
}

// contradicted reports whether a server that was asked before the attempt's may
// have data where the attempt's denies that there is any: it is up, and has yet
// to answer. A list may mix an internal resolver and a public one, and what the
// public one denies of an internal name must not be believed, let alone cached,
// because of a lost packet.
func (x *exchange) contradicted(a *attempt) bool {
	if a.index == 0 || x.n == 1 || !a.isDenial() {
		return false
	}
	for i := range x.n {
		b := x.at(i)
		switch {
		case b.index >= a.index || b.extra() || b.srv.paths[b.tr].down.Load() || x.moot(b):
		case b.waiting || b.cut:
			return true
		case b.failure:
			if !b.isForeign() {
				return true
			}
		case b.err != nil:
			return true
		}
	}
	return false
}

// failures returns how many attempts at a server were not delivered.
func (x *exchange) failures(index uint8) int {
	n := 0
	for i := range x.n {
		if b := x.at(i); b.index == index && !b.extra() && !b.waiting && b.err != nil {
			n++
		}
	}
	return n
}

// hold keeps a denial back until the servers before it have answered, or are
// known to be down. They are found out about at once if they have said nothing
// since the question; one that nobody listened at is asked once more.
func (x *exchange) hold(a *attempt) {
	if x.held == nil {
		x.held = a
	}
	for i, n := 0, x.n; i < n; i++ {
		b := x.at(i)
		if b.index >= a.index || b.extra() || x.moot(b) {
			continue
		}
		b.srv.verify(x, b)
		if !b.waiting && b.err != nil && x.failures(b.index) == 1 {
			x.resend(int(b.index), b.tr, true)
		}
	}
	x.settle()
}

// verify finds out whether a path works, unless that is known. The exchange is
// told when it is.
func (s *server) verify(x *exchange, a *attempt) {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[a.tr]
	known := p.down.Load() || a.awaited
	switch {
	case a.waiting:
		known = known || p.heard >= x.start
	case a.failure:
		known = known || a.isForeign() || x.f.now()-p.well < time.Second
	case a.cut:
		known = true
	}
	// In time for the exchange to draw the conclusion, or not for its sake.
	most := x.deadline - x.f.now() - grace
	if known || most < minConfirm {
		return
	}
	s.startConfirmation(x.route, a.tr, !a.waiting && a.failure, most)
	if p.confirming {
		p.awaiting = append(p.awaiting, x)
		a.awaited = true
		x.awaits++
	}
}

// awaitNoMore ends the wait for confirmations: afterwards no news of them come.
func (x *exchange) awaitNoMore() {
	if x.awaits == 0 {
		return
	}
	for _, s := range x.servers {
		s.mu.Lock()
		for t := range s.paths {
			p := &s.paths[t]
			p.awaiting = slices.DeleteFunc(p.awaiting, func(o *exchange) bool { return o == x })
		}
		s.unlock()
	}
}

// compare draws the conclusions about the servers that had no answer where a has
// one.
func (x *exchange) compare(a *attempt) {
	if x.n == 1 {
		return
	}
	data, now := !a.isDenial(), x.f.now()
	var outdone uint64 // servers, a bit each
	for i := range x.n {
		b := x.at(i)
		if b.srv == a.srv || b.extra() || x.moot(b) {
			continue
		}
		if !b.waiting && b.failure {
			b.srv.blame(x, b.tr)
		}
		late := b.waiting && now-b.sent >= minHedge
		if data && outdone&(1<<b.index) == 0 && (late || !b.waiting && b.failure) {
			outdone |= 1 << b.index
			b.srv.outdo(x, b)
		}
	}
}

// suspect tells the servers that have been silent for long so.
func (x *exchange) suspect(now time.Duration) {
	for i := range x.n {
		if a := x.at(i); a.waiting && !a.extra() && now-a.sent >= silence {
			a.srv.suspect(x, a)
		}
	}
}

// askNext asks the next server though it be early: for one that answers nothing
// which others have data for. That is the first question of the one server and
// the only one of the other, and so not charged.
func (x *exchange) askNext() bool {
	i, t := x.untried()
	return i >= 0 && x.ask(i, t, followed, false)
}
