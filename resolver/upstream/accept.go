package upstream

import (
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// verdict is what a message from a server is, whatever was asked.
type verdict uint8

const (
	garbage verdict = iota // no well-formed answer
	cut                    // an answer with TC set
	answer
)

// examine reads a message from a server. Where it leaves something unchecked,
// miekg/dns has to look.
func examine(msg []byte, r *dnswire.Response) verdict {
	if err := dnswire.ParseResponse(msg, r); err != nil {
		return garbage
	}
	if r.Flags&dnswire.FlagTC != 0 {
		return cut
	}
	return answer
}

// asked reports whether the answer is to our question: name (RFC 4343), type
// and class (RFC 5452 section 9.1). An error answer without a question, which
// ParseResponse lets pass only without records, is known by its id alone.
func (x *exchange) asked(msg []byte, r *dnswire.Response) bool {
	return r.NameLen == 0 || dnswire.EqualFold(msg[dnswire.HeaderLen:dnswire.HeaderLen+r.NameLen+4], x.question())
}

// isFailure reports whether another server might know better: an error, or a
// referral from a server that does not recurse.
func isFailure(msg []byte, r *dnswire.Response) bool {
	switch r.Rcode {
	case dnswire.RcodeNXDomain:
		return false
	case dnswire.RcodeNoError:
		_, an, ns, _ := dnswire.Counts(msg)
		return an == 0 && ns > 0 && r.Classify(msg).Kind == dnswire.Referral
	}
	return true
}

// receive takes in one message from the socket. now is when it arrived, owned
// tells that the caller will not use msg again. It reports whether the socket
// has more to wait for.
func (c *conn) receive(msg []byte, r *dnswire.Response, now time.Duration, owned bool) bool {
	v := examine(msg, r)
	if v == answer && r.Unchecked && c.expects(r.ID) && new(dns.Msg).Unpack(msg[:r.End]) != nil {
		v = garbage
	}
	x, i, more := c.take(msg, r, v, now)
	if x == nil {
		return more
	}
	a := x.at(int(i))
	a.cut = v == cut
	if !a.cut {
		msg = msg[:r.End]
		if !owned {
			msg = append(make([]byte, 0, len(msg)), msg...)
		}
		a.got = x.f.received.Get().(*received)
		a.got.msg, a.got.response = msg, *r
		a.got.response.Records = append(make([]dnswire.Record, 0, len(r.Records)), r.Records...)
	}
	x.events <- event{attempt: i, what: answered}
	return more
}

// expects reports whether an answer with the id is waited for: before the dear
// part of checking one.
func (c *conn) expects(id uint16) bool {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	return c.entries[id].x != nil
}

// take finds who waits for the message and, if it is the right answer, takes
// the waiting entry out: from then on the caller owes the exchange an event.
// Wrong answers are counted, and the wait goes on.
func (c *conn) take(msg []byte, r *dnswire.Response, v verdict, now time.Duration) (x *exchange, i uint8, more bool) {
	s := c.srv
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[c.tr]
	if len(msg) < dnswire.HeaderLen {
		p.wrong[WrongMessage]++
		return nil, 0, true
	}
	id := dnswire.ID(msg)
	e, ok := c.entries[id]
	switch {
	case !ok:
		p.wrong[WrongID]++
		return nil, 0, true
	case v == garbage:
		p.wrong[WrongMessage]++
		if e.x != nil {
			e.x.at(int(e.i)).garbled = true
		}
		return nil, 0, true
	case e.x != nil && !e.x.asked(msg, r):
		p.wrong[WrongQuestion]++
		return nil, 0, true
	}
	delete(c.entries, id)
	c.heard, c.silent, c.rebuffs = now, 0, 0
	// Nobody waits as long as this: an answer that comes later says that the
	// socket leads somewhere, but not that the path is of use.
	timely := now-e.sent <= s.f.config.Timeouts.Total
	if timely {
		p.heard, p.silent = now, ledger{}
	}
	p.sample(now - e.sent)
	p.latency.add(now - e.sent)
	s.promote(c, now)
	fine := v == answer && !isFailure(msg, r)
	if fine && timely {
		p.well = now
		s.good(c.tr)
	}
	if e.x == nil {
		p.late++
		return nil, 0, !c.done()
	}
	c.live--
	a := e.x.at(int(e.i))
	if fine && !a.extra() {
		p.outdone, p.vouched = 0, false
		s.remember(e.x)
	}
	if a.edns && !chokes(r.Rcode) {
		s.tookOPT(now)
	}
	if a.failure = !fine && v == answer; a.failure {
		p.failures[Rcode]++
	}
	s.judge(e.x)
	return e.x, e.i, !c.done()
}
