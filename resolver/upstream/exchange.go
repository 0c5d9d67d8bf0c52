package upstream

import (
	"cmp"
	"context"
	"errors"
	"hash/maphash"
	"net/netip"
	"syscall"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Question is what to ask.
type Question struct {
	Name        []byte // folded, in wire form
	Type, Class uint16
	DO, CD      bool
	// Waited is how long the client has waited before the question came here. It
	// is part of Timeouts.Total: see Left.
	Waited time.Duration
}

// Left returns what is left of a total to a question whose client has waited
// before. It is two thirds at least.
func Left(total, waited time.Duration) time.Duration { return total - min(waited, total/3) }

// Answer is a server's answer. It belongs to the caller.
type Answer struct {
	// Msg is the message as it came: well-formed, with the question that was
	// asked (in the case that the server gave it), never truncated.
	Msg       []byte
	Response  dnswire.Response // of Msg
	Server    netip.AddrPort
	Transport Transport
}

// exchange is one question on its way. Its fields belong to the goroutine that
// called Exchange, except where attempt says otherwise. It is used again: once
// finish has returned, nothing leads to it any more.
type exchange struct {
	f     *Forwarder
	query []byte // the message, OPT last
	end   int    // of the question in query
	progress
	n      int // attempts, found by at
	few    [fewAttempts]attempt
	more   *[maxAttempts - fewAttempts]attempt
	events chan event
	timer  *time.Timer

	// Arguments and result of rawSend.
	sendTo func(fd uintptr) bool
	out    []byte
	errno  syscall.Errno
}

// progress is what of an exchange starts anew with each question.
type progress struct {
	route   *route
	servers []*server
	do      bool
	// hash is the question's, the same for each exchange that asks it. It and
	// start tell strikes apart.
	hash uint64

	start, hedgeAt, suspectAt, retryAt, deadline time.Duration
	hedged, suspected, retried                   bool // or it was considered
	resends                                      int
	tried                                        uint64 // servers, a bit each
	plain                                        bool   // no OPT any more
	needTCP                                      bool
	denied                                       bool     // a second question, by the budget
	failure                                      *attempt // its error answer is returned for want of a better one
	lastErr                                      error

	// held is a denial that a server before it in order may contradict.
	held   *attempt
	awaits int // confirmations

	over bool
	won  *attempt // whose answer is the exchange's
	err  error

	// Guarded by the first attempt's srv.mu: for which kinds of second
	// question the exchange came too late, and whether it was judged.
	late   [numKinds]bool
	judged bool
}

// event is what an exchange is told about one of its attempts.
type event struct {
	attempt uint8
	what    news
}

// news is the kind of an event. The first two end the attempt's wait.
type news uint8

const (
	answered      news = iota
	failed             // nobody will answer
	socketRetired      // its socket leads nowhere: ask over another
	socketRefused      // some of its socket's questions have been refused
	pathDown           // its path went down: ask another server
	verified           // a confirmation that the exchange awaits is over
	numNews
)

func newExchange(f *Forwarder) *exchange {
	x := &exchange{
		f:      f,
		timer:  time.NewTimer(time.Hour),
		events: make(chan event, maxAttempts*int(numNews)), // senders never wait
	}
	x.timer.Stop()
	x.sendTo = x.rawSend
	return x
}

// begin prepares the question. AD is set so that a validating server tells even
// where DO is not (RFC 6840 section 5.7).
func (x *exchange) begin(r *route, q *Question) {
	flags := dnswire.FlagRD | dnswire.FlagAD
	if q.CD {
		flags |= dnswire.FlagCD
	}
	x.progress = progress{route: r, servers: *r.servers.Load(), do: q.DO}
	x.query = dnswire.AppendQuery(x.query[:0], 0, flags, q.Name, q.Type, q.Class, &dnswire.OPT{Size: udpSize, DO: q.DO})
	x.end = dnswire.HeaderLen + len(q.Name) + 4
	x.hash = maphash.Bytes(x.f.seed, x.question())
	x.start = x.f.now()
	x.retryAt = x.start + x.f.config.Timeouts.Retry
	x.deadline = x.start + Left(x.f.config.Timeouts.Total, q.Waited)
}

// question returns the question in wire form.
func (x *exchange) question() []byte { return x.query[dnswire.HeaderLen:x.end] }

// message returns the query with or without OPT. It writes outside of the
// question, which readers compare at the same time.
func (x *exchange) message(id uint16, edns bool) []byte {
	msg, additional := x.query, uint16(1)
	if !edns {
		msg, additional = x.query[:x.end], 0
	}
	dnswire.SetID(msg, id)
	dnswire.SetCounts(msg, 1, 0, 0, additional)
	return msg
}

// run asks, and asks again, until there is an answer or no hope of one.
func (x *exchange) run(ctx context.Context) {
	if ctx.Err() != nil {
		x.canceled(ctx)
		return
	}
	x.askFirst()
	for !x.over {
		x.timer.Reset(x.due() - x.f.now())
		select {
		case e := <-x.events:
			x.event(e)
		case <-x.timer.C:
			x.tick(x.f.now())
		case <-ctx.Done():
			x.canceled(ctx)
		}
	}
	x.finish()
}

// canceled ends the exchange since its caller's context has.
func (x *exchange) canceled(ctx context.Context) {
	reason := Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		reason = Timeout
	}
	x.fail(reason, context.Cause(ctx))
}

// due returns when tick has something to do.
func (x *exchange) due() time.Duration {
	at := x.deadline
	if !x.hedged {
		at = min(at, x.hedgeAt)
	}
	if !x.suspected {
		at = min(at, x.suspectAt)
	}
	if !x.retried {
		at = min(at, x.retryAt)
	}
	return at
}

func (x *exchange) tick(now time.Duration) {
	if now >= x.deadline {
		x.giveUp()
		return
	}
	if !x.hedged && now >= x.hedgeAt {
		x.hedged = true
		x.hedge(now)
	}
	if !x.suspected && now >= x.suspectAt {
		x.suspected = true
		x.suspect(now)
	}
	if !x.retried && now >= x.retryAt {
		x.retried = true
		x.retry(now)
	}
}

func (x *exchange) event(e event) {
	a := x.at(int(e.attempt))
	switch e.what {
	case verified:
		x.awaits--
		x.settle()
	case answered:
		a.waiting = false
		x.answered(a)
	case failed:
		a.waiting = false
		x.undelivered(a)
	case socketRetired:
		if !a.extra() {
			x.resend(int(a.index), a.tr, false)
		}
	case socketRefused:
		if !a.extra() && a.waiting {
			x.maybeUndelivered(a)
		}
	case pathDown:
		if x.held != nil && !x.contradicted(x.held) {
			x.accept(x.held)
		} else if i, t := x.untried(); i >= 0 {
			x.resend(i, t, false)
		}
	}
}

// accept ends the exchange with the attempt's answer.
func (x *exchange) accept(a *attempt) {
	x.over, x.won = true, a
}

// answer returns the answer that ended the exchange, if one did.
func (x *exchange) answer() (a Answer) {
	w := x.won
	if w == nil {
		return a
	}
	a = Answer{Msg: w.got.msg, Response: w.got.response, Server: w.srv.addr, Transport: w.tr}
	if a.Response.NameLen == 0 {
		a.restoreQuestion(x.question())
	}
	return a
}

// restoreQuestion gives an error answer that came without its question the one
// that was asked.
func (a *Answer) restoreQuestion(question []byte) {
	msg := append(make([]byte, 0, dnswire.HeaderLen+len(question)), a.Msg[:dnswire.HeaderLen]...)
	dnswire.SetCounts(msg, 1, 0, 0, 0)
	a.Msg = append(msg, question...)
	_ = dnswire.ParseResponse(a.Msg, &a.Response) // a header of an error and a question of ours: well-formed
}

// fail ends the exchange without an answer.
func (x *exchange) fail(reason Reason, err error) {
	x.over = true
	e := &Error{Reason: reason, Err: err}
	if x.n > 0 {
		e.Server = x.at(x.n - 1).srv.addr
	}
	x.err = e
}

// settle ends the exchange if nothing is left to wait for. An error answer is
// not kept back for another socket to the same server, unless it came over UDP and
// the whole of a truncated answer is awaited over TCP. A truncated one is not kept
// back for UDP, and nothing for a probe.
func (x *exchange) settle() {
	switch {
	case x.held != nil && !x.contradicted(x.held):
		x.accept(x.held)
		return
	case x.awaits > 0:
		return
	}
	for i := range x.n {
		a := x.at(i)
		same := x.failure != nil && x.failure.srv == a.srv && !(x.needTCP && x.failure.tr == UDP)
		if a.waiting && !a.extra() && !same && !(x.needTCP && a.tr == UDP) {
			return
		}
	}
	x.giveUp()
}

// giveUp ends the exchange with the error answer that there is, or the error
// that says most.
func (x *exchange) giveUp() {
	switch {
	case x.held != nil && !x.contradicted(x.held):
		x.accept(x.held)
		return
	case x.failure != nil:
		x.accept(x.failure)
		return
	}
	waiting, malformed := false, false
	sent, unsent := 0, error(nil)
	for i := range x.n {
		a := x.at(i)
		if a.extra() {
			continue
		}
		garbled, err := a.fate()
		waiting = waiting || a.waiting
		malformed = malformed || garbled
		if unsent = cmp.Or(unsent, err); err == nil && (a.waiting || a.err == nil) {
			sent++
		}
	}
	switch {
	case x.f.closed.Load():
		x.fail(Closed, nil)
	case x.needTCP:
		x.fail(Truncated, errors.Join(errTruncated, x.lastErr))
	case !waiting && IsLocal(x.lastErr):
		x.fail(Local, x.lastErr)
	case !waiting:
		x.fail(Network, x.lastErr)
	case sent == 0:
		x.fail(Local, unsent)
	case malformed:
		x.fail(Malformed, nil)
	case x.denied && x.n == 1:
		x.fail(OverBudget, nil)
	default:
		x.fail(Timeout, nil)
	}
}

// finish makes sure that no socket knows the exchange any more.
func (x *exchange) finish() {
	x.awaitNoMore()
	now := x.f.now()
	owed := 0
	for i := range x.n {
		a := x.at(i)
		if a.waiting && !a.conn.forget(x, uint8(i), now) { //nolint:gosec // below maxAttempts
			owed++
		}
	}
	// An answer is on its way from a reader's hands: it writes into its
	// attempt, so wait for it.
	for owed > 0 {
		if e := <-x.events; e.what == answered || e.what == failed {
			owed--
		}
	}
	for len(x.events) > 0 {
		<-x.events
	}
}

// reset drops what the exchange holds for others.
func (x *exchange) reset() {
	for i := range x.n {
		a := x.at(i)
		if a.got != nil {
			*a.got = received{}
			x.f.received.Put(a.got)
		}
		*a = attempt{}
	}
	x.n, x.more, x.progress, x.out = 0, nil, progress{}, nil
}
