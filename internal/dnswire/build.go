package dnswire

import (
	"encoding/binary"
	"time"
	"unicode/utf8"
)

// Extended DNS error codes (RFC 8914 section 4; 29: the IANA registry).
const (
	EDEOther         uint16 = 0
	EDEStale         uint16 = 3
	EDECachedError   uint16 = 13
	EDENotReady      uint16 = 14
	EDEStaleNXDomain uint16 = 19
	EDENoReachable   uint16 = 22
	EDENetworkError  uint16 = 23
	EDEInvalidData   uint16 = 24
	EDESynthesized   uint16 = 29
)

const (
	optHeaderLen      = 11 // root, type, class, TTL, RDLENGTH
	maxEDEText        = 64 // our own bound: errors must not need TCP
	keepaliveUnit     = 100 * time.Millisecond
	maxKeepaliveUnits = 65535
)

// OPT describes an OPT record of ours (RFC 6891 section 6.1).
type OPT struct {
	Size      uint16 // largest UDP message that we take, octets
	Rcode     uint16 // whole rcode; its upper eight bits go into the record
	DO        bool
	HasEDE    bool
	EDE       uint16
	EDEText   string        // UTF-8; cut to 64 octets
	Keepalive time.Duration // edns-tcp-keepalive, in steps of 100 ms; none if zero
}

// Len returns the length in octets of the record.
func (o *OPT) Len() int {
	n := optHeaderLen
	if o.HasEDE {
		n += 6 + len(o.text())
	}
	if o.Keepalive > 0 {
		n += 6
	}
	return n
}

// text returns EDEText, cut between characters if it is too long.
func (o *OPT) text() string {
	if len(o.EDEText) <= maxEDEText {
		return o.EDEText
	}
	n := maxEDEText
	for n > 0 && !utf8.RuneStart(o.EDEText[n]) {
		n--
	}
	return o.EDEText[:n]
}

// AppendOPT appends the record. The additional count is the caller's.
func AppendOPT(dst []byte, o *OPT) []byte {
	dst = append(dst, 0)
	dst = binary.BigEndian.AppendUint16(dst, TypeOPT)
	dst = binary.BigEndian.AppendUint16(dst, o.Size)
	flags := uint16(0)
	if o.DO {
		flags = 1 << 15
	}
	dst = append(dst, byte(o.Rcode>>4), 0)
	dst = binary.BigEndian.AppendUint16(dst, flags)
	dst = binary.BigEndian.AppendUint16(dst, uint16(o.Len()-optHeaderLen)) //nolint:gosec // at most 82
	if o.HasEDE {
		text := o.text()
		dst = binary.BigEndian.AppendUint16(dst, optEDE)
		dst = binary.BigEndian.AppendUint16(dst, uint16(2+len(text))) //nolint:gosec // at most 66
		dst = binary.BigEndian.AppendUint16(dst, o.EDE)
		dst = append(dst, text...)
	}
	if o.Keepalive > 0 {
		dst = binary.BigEndian.AppendUint16(dst, optKeepalive)
		dst = binary.BigEndian.AppendUint16(dst, 2)
		dst = binary.BigEndian.AppendUint16(dst, uint16(min(o.Keepalive/keepaliveUnit, maxKeepaliveUnits)))
	}
	return dst
}

// AppendQuestion appends a question for a wire-form name.
func AppendQuestion(dst, name []byte, qtype, qclass uint16) []byte {
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint16(dst, qtype)
	return binary.BigEndian.AppendUint16(dst, qclass)
}

// AppendQuery appends a query for a wire-form name, with the OPT record if
// there is one. Of flags, RD, AD and CD make sense.
func AppendQuery(dst []byte, id, flags uint16, name []byte, qtype, qclass uint16, opt *OPT) []byte {
	var ar byte
	if opt != nil {
		ar = 1
	}
	dst = append(dst, byte(id>>8), byte(id), byte(flags>>8), byte(flags), 0, 1, 0, 0, 0, 0, 0, ar)
	dst = AppendQuestion(dst, name, qtype, qclass)
	if opt != nil {
		dst = AppendOPT(dst, opt)
	}
	return dst
}

// replyFlags are the flag bits that a reply takes from its query.
const replyFlags = opcodeMask | FlagRD | FlagCD

// AppendError appends an answer without records to the query: its id, opcode,
// RD, CD and question (if it has a readable one) as they were sent, the rcode,
// and an OPT record if the query had one (RFC 6891 section 6.1.1). Of opt,
// Rcode and DO are set here.
func AppendError(dst, query []byte, q *Query, rcode uint16, opt OPT) []byte {
	n := len(dst)
	dst = append(dst, query[:q.QuestionEnd()]...)
	msg := dst[n:]
	SetFlags(msg, FlagQR|FlagRA|q.Flags&replyFlags|rcode&rcodeMask)
	var qd, ar uint16
	if q.NameLen > 0 {
		qd = 1
	}
	if q.EDNS {
		ar = 1
	}
	SetCounts(msg, qd, 0, 0, ar)
	if q.EDNS {
		opt.Rcode, opt.DO = rcode, q.DO
		dst = AppendOPT(dst, &opt)
	}
	return dst
}

// SetTTL sets the TTL at off.
func SetTTL(msg []byte, off int, ttl uint32) { binary.BigEndian.PutUint32(msg[off:], ttl) }

// AgeTTL takes age seconds from the TTL at off, down to zero.
func AgeTTL(msg []byte, off int, age uint32) {
	ttl := binary.BigEndian.Uint32(msg[off:])
	SetTTL(msg, off, ttl-min(ttl, age))
}
