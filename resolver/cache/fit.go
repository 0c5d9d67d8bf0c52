package cache

import (
	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// fit tells how many of the entry's records, from the first on, an answer to q
// of at most limit octets has, where the last of them ends, and whether
// something is missing that the client needs, so that TC must be set. The
// question always stays: a limit below 512 is not a limit of DNS.
//
// Records are left out RRset by RRset, but for one case. Where the answer
// section is cut, the part of the RRset that fits stays, with TC (RFC 2181
// section 9: "the partial RRset that would not completely fit may be left in the
// response"): there are clients without EDNS and without TCP, which use what
// there is (musl before 1.2.4, busybox), and BIND and CoreDNS answer them so.
// Those that validate get whole RRsets: without its other records a signature
// is bogus.
//
// The additional section is never missed. The authority section is where the
// client validates, where it is all that the answer has, and where it makes the
// answer a negative one (the SOA record at the end of a CNAME chain).
func (e Entry) fit(query []byte, q *dnswire.Query, limit int) (n, end int, tc bool) {
	m := message{e: e, query: query, body: e.body(), from: q.QuestionEnd()}
	answers := int(e.count(dnswire.Answer))
	authority := answers + int(e.count(dnswire.Authority))
	all := e.records()
	for n < all && m.end(n) <= limit {
		n++
	}
	if n >= answers || q.DO {
		for n > 0 && n < all && m.section(n-1) == m.section(n) && m.sameSet(n-1, n) {
			n--
		}
	}
	tc = n < answers || n < authority && (q.DO || answers == 0)
	for i := n; i < authority && !tc; i++ {
		tc = m.typ(i) == dnswire.TypeSOA
	}
	return n, m.start(n), tc
}

// kept returns the section counts of the first n records.
func kept(an, ns, ar, n uint16) (uint16, uint16, uint16) {
	an = min(an, n)
	ns = min(ns, n-an)
	return an, ns, min(ar, n-an-ns)
}

// message reads the message that a query's header and question and an entry's
// records make together, without putting it together. Records are found by
// their TTLs.
type message struct {
	e     Entry
	query []byte
	body  string
	from  int // where body begins
}

// at returns the octet at an offset of the message.
func (m *message) at(off int) byte {
	if off < m.from {
		return m.query[off]
	}
	return m.body[off-m.from]
}

// start returns the offset of the i-th record's owner name.
func (m *message) start(i int) int {
	if i == 0 {
		return m.from
	}
	return m.end(i - 1)
}

// end returns the offset behind the i-th record.
func (m *message) end(i int) int {
	ttl := m.e.ttlOff(i)
	return ttl + 6 + int(be16(m.body, ttl+4-m.from))
}

func (m *message) typ(i int) uint16 { return be16(m.body, m.e.ttlOff(i)-4-m.from) }

func (m *message) class(i int) uint16 { return be16(m.body, m.e.ttlOff(i)-2-m.from) }

func (m *message) section(i int) dnswire.Section {
	answers := int(m.e.count(dnswire.Answer))
	switch {
	case i < answers:
		return dnswire.Answer
	case i < answers+int(m.e.count(dnswire.Authority)):
		return dnswire.Authority
	}
	return dnswire.Additional
}

// sameSet reports whether two records of a section are of one RRset (RFC 2181
// section 5). RRSIG records of one owner count as one set here: more than RFC
// 4034 asks, never less.
func (m *message) sameSet(i, j int) bool {
	return m.typ(i) == m.typ(j) && m.class(i) == m.class(j) && m.sameName(m.start(i), m.start(j))
}

// sameName reports whether the names at two offsets are the same but for case.
// Store has accepted them: pointers lead back to labels, and none is too long.
func (m *message) sameName(a, b int) bool {
	for range dnswire.MaxNameLen {
		a, b = m.label(a), m.label(b)
		if a == b {
			return true // from here on the same octets
		}
		n := int(m.at(a))
		if n != int(m.at(b)) {
			return false
		}
		if n == 0 {
			return true
		}
		for k := 1; k <= n; k++ {
			if lower(m.at(a+k)) != lower(m.at(b+k)) {
				return false
			}
		}
		a, b = a+1+n, b+1+n
	}
	return false
}

// label follows pointers from off to the label where the name goes on.
func (m *message) label(off int) int {
	for range dnswire.MaxNameLen {
		c := int(m.at(off))
		if c < 0xc0 {
			break
		}
		off = (c&0x3f)<<8 | int(m.at(off+1))
	}
	return off
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
