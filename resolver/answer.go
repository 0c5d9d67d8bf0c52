package resolver

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// udpSize is the largest answer over UDP, and what we tell clients: 1,232
// octets fit IPv6's minimum MTU without fragments (RFC 9715 appendix, DNS flag
// day 2020).
const udpSize = 1232

// hinfo is the whole answer to ANY, but for the name: a HINFO record (RFC 8482
// section 4.2) at the qname (a pointer to octet 12), with the TTL that section
// 6 leaves to taste.
const hinfo = "\xc0\x0c\x00\x0d\x00\x01\x00\x00\x0e\x10\x00\x09\x07RFC8482\x00"

// source is where a query came from and where its answer goes.
type source struct {
	transport Transport
	replier   replier
	peer      netip.AddrPort
	from      *unix.RawSockaddrInet6 // until settle: the peer, in the reader's buffers
	local     []byte                 // control message that names the local address, if any
}

// settle converts the peer's address: hits do without.
func (s *source) settle() {
	if s.from != nil {
		s.peer, s.from = sockaddr(s.from), nil
	}
}

// replier is the connection or socket that a waiter's answer leaves through.
type replier interface {
	// owe is called when a query begins to wait.
	owe()
	// reply is called once for each owe. It does not block and keeps
	// nothing of msg.
	reply(w *waiter, msg []byte)
}

// scratch is what one goroutine needs to work on one query after the other
// without allocating.
type scratch struct {
	c *counters
	tally
	q   dnswire.Query
	key []byte

	// The client's search list, where it is not the one that its address
	// tells: Explain asks for clients that do not exist.
	list      *search.List
	listGiven bool
}

func newScratch(c *counters) *scratch {
	return &scratch{c: c, key: make([]byte, 0, dnswire.MaxNameLen+32)}
}

// limit returns the largest answer in octets that the query's client takes.
func limit(q *dnswire.Query, t Transport) int {
	if t == TCP {
		return dnswire.MaxMsgLen
	}
	return int(min(q.UDPSize, udpSize))
}

// answer works on the query in msg, which came from src at now. It appends the
// answer to dst; if there is none to append, the query deserves none or waits
// in a flight, whose end answers it: waits tells which.
func (r *Resolver) answer(s *scratch, msg []byte, cut bool, src *source, now time.Duration, dst []byte) (reply []byte, waits bool) {
	reply, waits = r.work(s, msg, cut, src, now, dst)
	s.publish()
	return reply, waits
}

// work is answer, but for what the scratch has counted: the caller publishes it.
// dst may be msg[:0], so that the answer takes the place of the query.
func (r *Resolver) work(s *scratch, msg []byte, cut bool, src *source, now time.Duration, dst []byte) (reply []byte, waits bool) {
	verdict := dnswire.ParseQuery(msg, &s.q)
	if verdict == dnswire.Drop {
		s.c.dropped.Add(1)
		return dst, false
	}
	s.queries[src.transport]++
	if cut && verdict == dnswire.Accept {
		verdict = dnswire.FormErr
	}
	switch verdict {
	case dnswire.FormErr:
		return r.refuse(s, msg, dst, dnswire.RcodeFormErr), false
	case dnswire.NotImp:
		return r.refuse(s, msg, dst, dnswire.RcodeNotImp), false
	case dnswire.BadVers:
		return r.refuse(s, msg, dst, dnswire.RcodeBadVers), false
	}
	if s.q.Class != dnswire.ClassIN {
		return r.refuse(s, msg, dst, dnswire.RcodeNotImp), false
	}
	switch s.q.Type {
	case dnswire.TypeANY:
		return r.minimalAny(s, msg, dst), false
	case dnswire.TypeAXFR, dnswire.TypeIXFR, dnswire.TypeMAILA, dnswire.TypeMAILB, dnswire.TypeTKEY, dnswire.TypeTSIG:
		// Zone transfers, and types that are no data (RFC 6895 section 3.1).
		return r.refuse(s, msg, dst, dnswire.RcodeNotImp), false
	}
	s.key = cache.AppendKey(s.key[:0], s.q.Name(msg), s.q.Type, s.q.Class, s.q.DO, s.q.CD())
	entry, kind := r.cache.Lookup(s.key, now)
	if kind == cache.Positive {
		return r.hit(s, msg, src, nil, entry, kind, now, dst), false
	}
	src.settle()
	// No data under the name: it may be a step of the client's search list.
	w, ok := r.walks.plan(s, src.peer.Addr(), now)
	if !ok {
		if kind == cache.Miss {
			return r.join(s, msg, src, nil, now, dst)
		}
		return r.hit(s, msg, src, nil, entry, kind, now, dst), false
	}
	id := w.List().ID()
	s.key = append(s.key, id[:]...)
	if entry, kind = r.cache.Lookup(s.key, now); kind == cache.Miss {
		return r.join(s, msg, src, &w, now, dst)
	}
	return r.hit(s, msg, src, &w, entry, kind, now, dst), false
}

// hit appends what the cache has for s.key, and counts it.
func (r *Resolver) hit(s *scratch, msg []byte, src *source, w *search.Walk, entry cache.Entry, kind cache.Kind, now time.Duration, dst []byte) []byte {
	o := outcome{entry: entry, ok: true}
	switch kind {
	case cache.Positive:
		s.hits[HitPositive]++
		if r.prefetch.Load() && entry.PrefetchDue(now) {
			r.startPrefetch(s, msg, w, now)
		}
	case cache.Negative:
		s.hits[HitNegative]++
	case cache.Stale:
		s.hits[HitStale]++
		o.stale = true
	case cache.Failed:
		s.hits[HitFailure]++
		o = outcome{}
		o.failure, _ = r.cache.Failure(s.key, now)
	}
	dst, rcode := r.encode(s.c, dst, msg, &s.q, w, src.transport, now, &o)
	s.response(rcode)
	return dst
}

// outcome is what a query is answered with: an entry, fresh or stale, or a
// failure.
type outcome struct {
	entry   cache.Entry
	ok      bool
	stale   bool
	failure cache.Failure
}

// encode appends the answer to a query, for hits and misses alike, and returns
// the rcode for the caller to count. w is the walk that the query began, if any.
func (r *Resolver) encode(c *counters, dst, query []byte, q *dnswire.Query, w *search.Walk, t Transport, now time.Duration, o *outcome) (reply []byte, rcode uint16) {
	var keepalive time.Duration
	if t == TCP && q.Keepalive {
		keepalive = r.conns.idle()
	}
	if !o.ok {
		return dnswire.AppendError(dst, query, q, o.failure.Rcode, dnswire.OPT{
			Size: udpSize, HasEDE: true, EDE: o.failure.EDE, EDEText: o.failure.Text, Keepalive: keepalive,
		}), o.failure.Rcode
	}
	n := len(dst)
	dst = o.entry.AppendReply(dst, query, q, cache.ReplyOptions{
		Now: now, Limit: limit(q, t), Stale: o.stale, Keepalive: keepalive,
	})
	flags := dnswire.Flags(dst[n:])
	rcode = flags & 0xf
	if w == nil {
		return dst, rcode
	}
	if spared := o.entry.Led(); spared > 0 && flags&dnswire.FlagTC == 0 {
		c.saved.Add(uint64(spared)) //nolint:gosec // a small number
	} else if spared > 0 { // its answer does not fit: the client may go on by itself
		r.walks.leave(w, now)
	}
	return dst, rcode
}

// refuse appends an answer without records.
func (r *Resolver) refuse(s *scratch, msg, dst []byte, rcode uint16) []byte {
	s.response(rcode)
	return dnswire.AppendError(dst, msg, &s.q, rcode, dnswire.OPT{Size: udpSize})
}

// shed appends the answer to a query that is not worked on.
func (r *Resolver) shed(s *scratch, msg, dst []byte, reason Shed) []byte {
	s.c.shed[reason].Add(1)
	s.response(dnswire.RcodeServFail)
	return dnswire.AppendError(dst, msg, &s.q, dnswire.RcodeServFail, dnswire.OPT{
		Size: udpSize, HasEDE: true, EDE: dnswire.EDEOther, EDEText: shedText[reason],
	})
}

var shedText = [NumShed]string{ //nolint:gochecknoglobals // a constant table
	ShedInFlight: "dnsguard: too many questions in flight",
	ShedClient:   "dnsguard: too many questions of this client in flight",
	ShedWaiters:  "dnsguard: too many clients waiting",
}

// minimalAny appends the answer to a query for ANY (RFC 8482).
func (r *Resolver) minimalAny(s *scratch, msg, dst []byte) []byte {
	n := len(dst)
	s.response(dnswire.RcodeNoError)
	dst = dnswire.AppendError(dst, msg, &s.q, dnswire.RcodeNoError, dnswire.OPT{Size: udpSize})
	// The record goes before the OPT record: what lies past the question moves up.
	end := n + s.q.QuestionEnd()
	dst = append(dst, hinfo...)
	copy(dst[end+len(hinfo):], dst[end:len(dst)-len(hinfo)])
	copy(dst[end:], hinfo)
	qd, _, ns, ar := dnswire.Counts(dst[n:])
	dnswire.SetCounts(dst[n:], qd, 1, ns, ar)
	return dst
}
