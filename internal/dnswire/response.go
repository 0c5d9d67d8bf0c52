package dnswire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Section is a section of a message that holds records.
type Section uint8

// The sections, in wire order.
const (
	Answer Section = iota
	Authority
	Additional
)

// Record locates one resource record of a message by offsets into it.
type Record struct {
	Off     int // of the owner name
	TTLOff  int // of the TTL
	DataOff int // of the RDATA
	End     int // past the record
	Type    uint16
	Class   uint16
	Section Section
}

// maxTTL is the greatest TTL (RFC 2181 section 8).
const maxTTL = 1<<31 - 1

// TTL returns the record's TTL in seconds. A TTL with the top bit set is zero
// (RFC 2181 section 8).
func (r *Record) TTL(msg []byte) uint32 { return ttlAt(msg, r.TTLOff) }

func ttlAt(msg []byte, off int) uint32 {
	if ttl := binary.BigEndian.Uint32(msg[off:]); ttl <= maxTTL {
		return ttl
	}
	return 0
}

// Response locates the parts of an answer. It may be used again for another
// message: ParseResponse keeps the capacity of Records.
type Response struct {
	ID    uint16
	Flags uint16
	// Rcode is the whole response code, with the OPT record's upper bits.
	Rcode uint16
	// NameLen is the length of the qname in octets, 0 if an error answer
	// came without its question: then there are no records either. The qname
	// is uncompressed at HeaderLen.
	NameLen int
	Type    uint16
	Class   uint16
	// Records are all records but OPT, in wire order. Of an answer with TC
	// set they may be fewer than the header counts.
	Records []Record
	// OPT record: whether there is one, its octets [OPTOff, OPTEnd), and
	// whether other records follow it.
	EDNS    bool
	DO      bool
	OPTLast bool
	OPTOff  int
	OPTEnd  int
	UDPSize uint16
	// Unchecked tells that there is RDATA, or an EDNS option, that
	// ParseResponse does not know how to check.
	Unchecked bool
	// End is the offset past the last record that was read; octets may
	// follow it.
	End int
}

// Errors of ParseResponse. All of them mean: not an answer to anything that we
// asked; keep waiting.
var (
	errShort       = errors.New("shorter than a header")
	errNotResponse = errors.New("not a response to a query")
	errQuestion    = errors.New("not exactly one question")
	errRecord      = errors.New("record cut short")
	errRData       = errors.New("malformed RDATA")
	errOPT         = errors.New("misplaced, repeated or malformed OPT record")
)

// ParseResponse reads an answer and checks it: every name and every RDATA of
// the common types is well formed. On error r is undefined.
//
// Two kinds of answers need not be whole. An error answer may lack its question,
// as some servers' FORMERR does, or be a bare header whatever it counts, as some
// public resolvers' REFUSED is. An answer with TC set may be cut anywhere after
// the question, since its records are of no use (RFC 2181 section 9): Records has
// those in front of the first that is not well formed.
func ParseResponse(msg []byte, r *Response) error {
	*r = Response{Records: r.Records[:0]}
	if len(msg) < HeaderLen {
		return errShort
	}
	r.ID, r.Flags = ID(msg), Flags(msg)
	r.Rcode = r.Flags & rcodeMask
	if r.Flags&FlagQR == 0 || r.Flags&opcodeMask != 0 {
		return errNotResponse
	}
	failed := r.Rcode != RcodeNoError && r.Rcode != RcodeNXDomain
	r.End = HeaderLen
	if failed && len(msg) == HeaderLen {
		return nil
	}
	qd, an, ns, ar := Counts(msg)
	switch {
	case qd == 1:
		if err := r.question(msg); err != nil {
			return fmt.Errorf("question: %w", err)
		}
	case qd != 0 || !failed:
		return errQuestion
	}
	for s, count := range [...]uint16{Answer: an, Authority: ns, Additional: ar} {
		for ; count > 0; count-- {
			if err := r.record(msg, Section(s)); err != nil {
				if r.Flags&FlagTC != 0 && r.NameLen > 0 {
					return nil
				}
				return fmt.Errorf("record at octet %d: %w", r.End, err)
			}
		}
	}
	if r.NameLen == 0 && len(r.Records) > 0 {
		return errQuestion
	}
	return nil
}

// question reads the question at r.End.
func (r *Response) question(msg []byte) error {
	n, err := plainNameLen(msg, r.End)
	if err != nil {
		return err
	}
	off := r.End + n
	if off+4 > len(msg) {
		return errRecord
	}
	r.NameLen = n
	r.Type = binary.BigEndian.Uint16(msg[off:])
	r.Class = binary.BigEndian.Uint16(msg[off+2:])
	r.End = off + 4
	return nil
}

// record reads the record at r.End. It leaves r as it is on error.
func (r *Response) record(msg []byte, s Section) error {
	end, err := nameEnd(msg, r.End)
	if err != nil {
		return err
	}
	if end+10 > len(msg) {
		return errRecord
	}
	rec := Record{
		Off: r.End, TTLOff: end + 4, DataOff: end + 10, Section: s,
		Type: binary.BigEndian.Uint16(msg[end:]), Class: binary.BigEndian.Uint16(msg[end+2:]),
	}
	rec.End = rec.DataOff + int(binary.BigEndian.Uint16(msg[end+8:]))
	if rec.End > len(msg) {
		return errRecord
	}
	if rec.Type == TypeOPT {
		return r.opt(msg, &rec)
	}
	ok, known := checkRData(msg[:rec.End], rec.Type, rec.DataOff)
	if !ok {
		return errRData
	}
	r.Unchecked = r.Unchecked || !known
	r.Records = append(r.Records, rec)
	r.End, r.OPTLast = rec.End, false
	return nil
}

// opt takes in an OPT record. It leaves r as it is on error.
func (r *Response) opt(msg []byte, rec *Record) error {
	if rec.Section != Additional || r.EDNS || msg[rec.Off] != 0 {
		return errOPT
	}
	unchecked := r.Unchecked
	for data := msg[rec.DataOff:rec.End]; len(data) > 0; {
		code, n, rest, ok := cutOption(data)
		if !ok {
			return errOPT
		}
		unchecked = unchecked || !optionChecked(code, n)
		data = rest
	}
	r.Unchecked = unchecked
	r.EDNS, r.OPTOff, r.OPTEnd = true, rec.Off, rec.End
	r.UDPSize = max(MinUDPSize, rec.Class)
	r.Rcode |= uint16(msg[rec.TTLOff]) << 4
	r.DO = msg[rec.TTLOff+2]&0x80 != 0
	r.End, r.OPTLast = rec.End, true
	return nil
}

// checkRData checks the RDATA from off to the end of msg, and tells whether
// it knows the type.
func checkRData(msg []byte, typ uint16, off int) (ok, known bool) {
	names, skip, tail := 0, 0, 0
	switch typ {
	case TypeA:
		return len(msg)-off == 4, true
	case TypeAAAA:
		return len(msg)-off == 16, true
	case TypeNS, TypeCNAME, TypePTR, TypeDNAME, TypeMB, TypeMD, TypeMF, TypeMG, TypeMR:
		names = 1
	case TypeSOA:
		names, tail = 2, 20
	case TypeMX:
		names, skip = 1, 2
	case TypeSRV:
		names, skip = 1, 6
	case TypeTXT:
		if off == len(msg) {
			return false, true
		}
		for off < len(msg) {
			off += 1 + int(msg[off])
		}
		return off == len(msg), true
	default:
		return true, false
	}
	off += skip
	for ; names > 0; names-- {
		end, err := nameEnd(msg, off)
		if err != nil {
			return false, true
		}
		off = end
	}
	return off+tail == len(msg), true
}
