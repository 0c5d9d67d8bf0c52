package dnswire

import "encoding/binary"

// Verdict is what is to be done with a datagram that came in on a listening
// socket.
type Verdict uint8

// The verdicts of ParseQuery.
const (
	// Drop: no answer at all. Shorter than a header, or itself an answer
	// (two servers must not answer each other for ever).
	Drop Verdict = iota
	// Accept: a query with one question.
	Accept
	// FormErr: answer FORMERR.
	FormErr
	// NotImp: answer NOTIMP; an opcode other than QUERY.
	NotImp
	// BadVers: answer BADVERS with version 0 (RFC 6891 section 6.1.3).
	BadVers
)

// Query is what the query path needs to know of a query. The question lies in
// the datagram at Question; offsets are fixed, since a query's name is never
// compressed.
type Query struct {
	ID    uint16
	Flags uint16 // as sent
	Type  uint16
	Class uint16
	// NameLen is the length in octets of the qname in wire form, with the
	// root; 0 if the datagram has no readable question.
	NameLen int
	// EDNS tells that the query has an OPT record; the fields below are
	// zero without one.
	EDNS      bool
	DO        bool
	Keepalive bool // edns-tcp-keepalive was sent
	Version   uint8
	// UDPSize is the largest answer over UDP in octets that the client
	// takes: 512 without EDNS, and never less.
	UDPSize uint16
}

// QuestionEnd returns the offset past the question, or past the header if
// there is no readable question.
func (q *Query) QuestionEnd() int {
	if q.NameLen == 0 {
		return HeaderLen
	}
	return HeaderLen + q.NameLen + 4
}

// Name returns the qname as it was sent, in wire form.
func (q *Query) Name(msg []byte) []byte { return msg[HeaderLen : HeaderLen+q.NameLen] }

// RD reports whether recursion is desired.
func (q *Query) RD() bool { return q.Flags&FlagRD != 0 }

// AD reports whether the client wants to know of authenticated data (RFC 6840
// section 5.7).
func (q *Query) AD() bool { return q.Flags&FlagAD != 0 }

// CD reports whether checking is disabled.
func (q *Query) CD() bool { return q.Flags&FlagCD != 0 }

// ParseQuery reads a datagram or a TCP message that came in on a listening
// socket. It fills q as far as the verdict allows: after FormErr, NotImp and
// BadVers, q has what AppendError needs.
//
// Ignored are octets after the last record, as most servers do; the RDATA of
// additional records other than OPT (a TSIG or SIG(0) is nothing that we could
// check, and answered unsigned); and all EDNS options but two: cookies are
// checked for their length (RFC 7873 section 5.2.2), a keepalive is noted.
//
// Records in the answer or authority section are an error. That covers IXFR,
// whose queries carry an SOA record there (RFC 1995 section 3): a cache has no
// zones to transfer.
func ParseQuery(msg []byte, q *Query) Verdict {
	*q = Query{UDPSize: MinUDPSize}
	if len(msg) < HeaderLen {
		return Drop
	}
	q.ID, q.Flags = ID(msg), Flags(msg)
	if q.Flags&FlagQR != 0 {
		return Drop
	}
	if q.Flags&opcodeMask != 0 {
		return NotImp
	}
	qd, an, ns, ar := Counts(msg)
	if qd != 1 { // RFC 9619 section 4
		return FormErr
	}
	n, err := plainNameLen(msg, HeaderLen)
	if err != nil || HeaderLen+n+4 > len(msg) {
		return FormErr
	}
	off := HeaderLen + n
	q.NameLen = n
	q.Type = binary.BigEndian.Uint16(msg[off:])
	q.Class = binary.BigEndian.Uint16(msg[off+2:])
	off += 4
	if an != 0 || ns != 0 || q.Type == TypeOPT {
		return FormErr
	}
	for ; ar > 0; ar-- {
		end, err := nameEnd(msg, off)
		if err != nil || end+10 > len(msg) {
			return FormErr
		}
		typ := binary.BigEndian.Uint16(msg[end:])
		data := end + 10
		next := data + int(binary.BigEndian.Uint16(msg[end+8:]))
		if next > len(msg) {
			return FormErr
		}
		if typ == TypeOPT {
			if q.EDNS || msg[off] != 0 { // RFC 6891 section 6.1.1: one, at the root
				return FormErr
			}
			q.EDNS = true
			q.UDPSize = max(MinUDPSize, binary.BigEndian.Uint16(msg[end+2:]))
			q.Version = msg[end+5]
			q.DO = msg[end+6]&0x80 != 0
			// The options of a later version may look different.
			if q.Version == 0 && !q.options(msg[data:next]) {
				return FormErr
			}
		}
		off = next
	}
	if q.Version != 0 {
		return BadVers
	}
	return Accept
}

// options reads the RDATA of an OPT record. It reports whether it is well
// formed.
func (q *Query) options(data []byte) bool {
	for len(data) > 0 {
		code, n, rest, ok := cutOption(data)
		if !ok {
			return false
		}
		switch code {
		case optCookie:
			if n != 8 && (n < 16 || n > 40) {
				return false
			}
		case optKeepalive:
			// RFC 7828: a client sends no value (section 3.2.1), but over
			// UDP the option must be ignored (section 3.3.1), so that one
			// with a value is not an error here.
			q.Keepalive = q.Keepalive || n == 0
		}
		data = rest
	}
	return true
}
