package cache

import (
	"encoding/binary"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// udpSize is the largest UDP message that we tell clients to send: 1,232 octets
// fit IPv6's least MTU (DNS flag day 2020).
const udpSize = 1232

// staleTTL is the TTL of a stale answer's records in seconds (RFC 8767 section
// 4).
const staleTTL = 30

// ReplyOptions is what a reply depends on besides the entry and the query.
type ReplyOptions struct {
	Now   time.Duration
	Limit int // largest reply in octets, OPT included; 0: none but the protocol's
	// Stale marks the reply as stale (RFC 8767): TTLs of 30 s, and EDE 3, or
	// 19 for NXDOMAIN, unless another is given.
	Stale bool
	// TrustAD says that the upstream's AD flag can be believed. It is passed
	// on to clients that ask for it by AD or DO (RFC 6840 section 5.8).
	TrustAD bool
	// An extended error; only clients with EDNS get it.
	HasEDE  bool
	EDE     uint16
	EDEText string
	// Keepalive is the idle timeout to tell a TCP client that asks (RFC
	// 7828); 0: none.
	Keepalive time.Duration
}

// AppendReply appends the entry's answer to the query q, which lies in query
// with at least its header and question: the query's id, question octets, RD
// and CD as they were sent, QR and RA, AA and rcode as the answer came, TTLs
// aged to o.Now, an OPT record if the query had one. What does not fit into
// o.Limit is left out RRset by RRset, with TC where the client misses it.
//
// The query must ask the entry's question; if not even the length of the name
// is right, the answer is SERVFAIL rather than nonsense.
func (e Entry) AppendReply(dst, query []byte, q *dnswire.Query, o ReplyOptions) []byte {
	opt := dnswire.OPT{
		Size: udpSize, DO: q.DO, HasEDE: o.HasEDE, EDE: o.EDE, EDEText: o.EDEText,
	}
	if q.Keepalive {
		opt.Keepalive = o.Keepalive
	}
	if len(e.blob) == 0 || q.NameLen != int(e.blob[blobNameLen]) {
		return dnswire.AppendError(dst, query, q, dnswire.RcodeServFail, opt)
	}
	if o.Stale && !o.HasEDE {
		opt.HasEDE, opt.EDE = true, dnswire.EDEStale
		if e.Rcode() == dnswire.RcodeNXDomain {
			opt.EDE = dnswire.EDEStaleNXDomain
		}
	}
	limit, optCount := dnswire.MaxMsgLen, uint16(0)
	if o.Limit > 0 {
		limit = o.Limit
	}
	if q.EDNS {
		limit -= opt.Len()
		optCount = 1
	}

	base := len(dst)
	dst = append(dst, query[:q.QuestionEnd()]...)
	dst = append(dst, e.body()...)
	msg := dst[base:]
	e.age(msg, o)
	flags := dnswire.FlagQR | dnswire.FlagRA | q.Flags&(dnswire.FlagRD|dnswire.FlagCD) | e.flags()
	if !o.TrustAD || !q.AD() && !q.DO {
		flags &^= dnswire.FlagAD
	}
	an, ns, ar := e.count(dnswire.Answer), e.count(dnswire.Authority), e.count(dnswire.Additional)
	if len(msg) > limit {
		var n int
		var tc bool
		if n, an, ns, ar, tc = e.fit(msg, limit, q); tc {
			flags |= dnswire.FlagTC
		}
		dst = dst[:base+n]
	}
	dnswire.SetFlags(msg, flags)
	dnswire.SetCounts(msg, 1, an, ns, ar+optCount)
	if q.EDNS {
		dst = dnswire.AppendOPT(dst, &opt)
	}
	return dst
}

// age sets the TTLs of msg to what is left of them.
func (e Entry) age(msg []byte, o ReplyOptions) {
	if o.Stale {
		for i := range e.records() {
			dnswire.SetTTL(msg, e.ttlOff(i), staleTTL)
		}
		return
	}
	// A batch's instant may lie before that of an answer stored meanwhile.
	age := seconds(max(0, o.Now-e.stored()))
	if age == 0 {
		return
	}
	for i := range e.records() {
		dnswire.AgeTTL(msg, e.ttlOff(i), age)
	}
}

// fit tells how much of msg, which has no OPT record yet, fits into limit
// octets: see dnswire.Fit. The records are found again by their TTLs.
func (e Entry) fit(msg []byte, limit int, q *dnswire.Query) (n int, an, ns, ar uint16, tc bool) {
	var buf [64]dnswire.Record
	r := dnswire.Response{NameLen: q.NameLen, Records: buf[:0]}
	authority := int(e.count(dnswire.Answer))
	additional := authority + int(e.count(dnswire.Authority))
	off := q.QuestionEnd()
	for i := range e.records() {
		ttl := e.ttlOff(i)
		rec := dnswire.Record{
			Off: off, TTLOff: ttl, DataOff: ttl + 6, End: ttl + 6 + int(binary.BigEndian.Uint16(msg[ttl+4:])),
			Type: binary.BigEndian.Uint16(msg[ttl-4:]), Class: binary.BigEndian.Uint16(msg[ttl-2:]),
		}
		switch {
		case i >= additional:
			rec.Section = dnswire.Additional
		case i >= authority:
			rec.Section = dnswire.Authority
		}
		r.Records = append(r.Records, rec)
		off = rec.End
	}
	return dnswire.Fit(msg, &r, limit, q.DO)
}
