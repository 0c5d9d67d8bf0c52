package cache

import (
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
// o.Limit is left out, with TC where the client misses it (Entry.fit); no more
// than what stays is copied. Of an answer that was stored with StoreLed nothing
// stays then: it is NXDOMAIN with TC.
//
// The query must ask the entry's question; if not even the length of the name
// is right, the answer is SERVFAIL rather than nonsense.
func (e Entry) AppendReply(dst, query []byte, q *dnswire.Query, o ReplyOptions) []byte {
	if len(e.blob) == 0 || q.NameLen != int(e.blob[blobNameLen]) {
		return dnswire.AppendError(dst, query, q, dnswire.RcodeServFail, o.opt(q))
	}
	limit, optCount := dnswire.MaxMsgLen, uint16(0)
	if o.Limit > 0 {
		limit = o.Limit
	}
	var opt dnswire.OPT
	if q.EDNS {
		if o.Stale && !o.HasEDE {
			o.HasEDE, o.EDE = true, dnswire.EDEStale
			if e.Rcode() == dnswire.RcodeNXDomain {
				o.EDE = dnswire.EDEStaleNXDomain
			}
		}
		opt = o.opt(q)
		limit -= opt.Len()
		optCount = 1
	}

	from := q.QuestionEnd()
	body := e.body()
	n, end, tc := e.records(), from+len(body), false
	an, ns, ar := e.count(dnswire.Answer), e.count(dnswire.Authority), e.count(dnswire.Additional)
	flags := dnswire.FlagQR | dnswire.FlagRA | q.Flags&(dnswire.FlagRD|dnswire.FlagCD) | e.flags()
	if end > limit {
		if n, end, tc = e.fit(query, q, limit); tc && e.Led() > 0 {
			n, end, flags = 0, from, flags&^(rcodeMask|storedFlags)|dnswire.RcodeNXDomain
		}
		an, ns, ar = kept(an, ns, ar, uint16(n)) //nolint:gosec // a message has 65,535 octets
	}
	if tc {
		flags |= dnswire.FlagTC
	}
	if !o.TrustAD || !q.AD() && !q.DO {
		flags &^= dnswire.FlagAD
	}

	base := len(dst)
	dst = append(dst, query[:from]...)
	dst = append(dst, body[:end-from]...)
	msg := dst[base:]
	e.age(msg, n, &o)
	dnswire.SetFlags(msg, flags)
	dnswire.SetCounts(msg, 1, an, ns, ar+optCount)
	if q.EDNS {
		dst = dnswire.AppendOPT(dst, &opt)
	}
	return dst
}

// opt returns the OPT record of the reply to q.
func (o *ReplyOptions) opt(q *dnswire.Query) dnswire.OPT {
	opt := dnswire.OPT{Size: udpSize, DO: q.DO, HasEDE: o.HasEDE, EDE: o.EDE, EDEText: o.EDEText}
	if q.Keepalive {
		opt.Keepalive = o.Keepalive
	}
	return opt
}

// age sets the TTLs of msg, which has the entry's first n records, to what is
// left of them.
func (e Entry) age(msg []byte, n int, o *ReplyOptions) {
	if o.Stale {
		for i := range n {
			dnswire.SetTTL(msg, e.ttlOff(i), staleTTL)
		}
		return
	}
	// A batch's instant may lie before that of an answer stored meanwhile.
	age := seconds(max(0, o.Now-e.stored()))
	if age == 0 {
		return
	}
	for i := range n {
		dnswire.AgeTTL(msg, e.ttlOff(i), age)
	}
}
