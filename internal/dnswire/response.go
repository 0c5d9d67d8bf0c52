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

// TTL returns the record's TTL in seconds. A TTL with the top bit set is zero
// (RFC 2181 section 8).
func (r *Record) TTL(msg []byte) uint32 {
	ttl := binary.BigEndian.Uint32(msg[r.TTLOff:])
	if ttl > 1<<31-1 {
		return 0
	}
	return ttl
}

// Response locates the parts of an answer. It may be used again for another
// message: ParseResponse keeps the capacity of Records.
type Response struct {
	ID    uint16
	Flags uint16
	// Rcode is the whole response code, with the OPT record's upper bits.
	Rcode uint16
	// NameLen is the length of the qname in octets, 0 if an error answer
	// came without its question. The qname is uncompressed at HeaderLen.
	NameLen int
	Type    uint16
	Class   uint16
	// Records are all records but OPT, in wire order.
	Records []Record
	// OPT record: whether there is one, its octets [OPTOff, OPTEnd), and
	// whether other records follow it.
	EDNS    bool
	DO      bool
	OPTLast bool
	OPTOff  int
	OPTEnd  int
	UDPSize uint16
	// Unchecked tells that a record's type has RDATA that ParseResponse
	// does not know how to check.
	Unchecked bool
	// End is the offset past the last record; octets may follow it.
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
	errOPT         = errors.New("misplaced or repeated OPT record")
)

// ParseResponse reads an answer and checks it: every name and every RDATA of
// the common types is well formed. An error answer without records may lack
// its question, as some servers' FORMERR does. On error r is undefined.
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
	qd, an, ns, ar := Counts(msg)
	off := HeaderLen
	switch {
	case qd == 1:
		n, err := plainNameLen(msg, off)
		if err != nil {
			return fmt.Errorf("question: %w", err)
		}
		off += n
		if off+4 > len(msg) {
			return fmt.Errorf("question: %w", errRecord)
		}
		r.NameLen = n
		r.Type = binary.BigEndian.Uint16(msg[off:])
		r.Class = binary.BigEndian.Uint16(msg[off+2:])
		off += 4
	case qd == 0 && an == 0 && ns == 0 && r.Rcode != RcodeNoError:
	default:
		return errQuestion
	}
	for s, count := range [...]uint16{Answer: an, Authority: ns, Additional: ar} {
		for ; count > 0; count-- {
			next, err := r.record(msg, off, Section(s))
			if err != nil {
				return fmt.Errorf("record at octet %d: %w", off, err)
			}
			off = next
		}
	}
	r.End = off
	r.OPTLast = r.EDNS && r.OPTEnd == off
	return nil
}

// record reads the record at off and returns the offset past it.
func (r *Response) record(msg []byte, off int, s Section) (int, error) {
	end, err := nameEnd(msg, off)
	if err != nil {
		return 0, err
	}
	if end+10 > len(msg) {
		return 0, errRecord
	}
	rec := Record{
		Off: off, TTLOff: end + 4, DataOff: end + 10, Section: s,
		Type: binary.BigEndian.Uint16(msg[end:]), Class: binary.BigEndian.Uint16(msg[end+2:]),
	}
	rec.End = rec.DataOff + int(binary.BigEndian.Uint16(msg[end+8:]))
	if rec.End > len(msg) {
		return 0, errRecord
	}
	if rec.Type == TypeOPT {
		if s != Additional || r.EDNS || msg[off] != 0 {
			return 0, errOPT
		}
		r.EDNS, r.OPTOff, r.OPTEnd = true, off, rec.End
		r.UDPSize = max(MinUDPSize, rec.Class)
		r.Rcode |= uint16(msg[rec.TTLOff]) << 4
		r.DO = msg[rec.TTLOff+2]&0x80 != 0
		if !new(Query).options(msg[rec.DataOff:rec.End]) {
			return 0, errOPT
		}
		return rec.End, nil
	}
	ok, known := checkRData(msg[:rec.End], rec.Type, rec.DataOff)
	if !ok {
		return 0, errRData
	}
	r.Unchecked = r.Unchecked || !known
	r.Records = append(r.Records, rec)
	return rec.End, nil
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
