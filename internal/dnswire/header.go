package dnswire

import "encoding/binary"

// Sizes of RFC 1035 section 4 and RFC 6891, in octets.
const (
	HeaderLen  = 12  // section 4.1.1
	MaxNameLen = 255 // section 2.3.4, wire form with the root octet
	maxLabel   = 63  // section 2.3.4
	MinUDPSize = 512 // section 2.3.4; the floor for EDNS sizes too (RFC 6891 section 6.2.3)
	MaxMsgLen  = 65535
)

// Header flag bits, as in the second 16-bit word of a message (RFC 1035
// section 4.1.1; AD and CD: RFC 4035 section 3.2).
const (
	FlagQR uint16 = 1 << 15
	FlagAA uint16 = 1 << 10
	FlagTC uint16 = 1 << 9
	FlagRD uint16 = 1 << 8
	FlagRA uint16 = 1 << 7
	FlagAD uint16 = 1 << 5
	FlagCD uint16 = 1 << 4

	opcodeMask uint16 = 0xf << 11
	rcodeMask  uint16 = 0xf
)

// Response codes (RFC 1035 section 4.1.1; BADVERS: RFC 6891 section 9).
const (
	RcodeNoError  uint16 = 0
	RcodeFormErr  uint16 = 1
	RcodeServFail uint16 = 2
	RcodeNXDomain uint16 = 3
	RcodeNotImp   uint16 = 4
	RcodeRefused  uint16 = 5
	RcodeBadVers  uint16 = 16
)

// Record types that have a meaning of their own here.
const (
	TypeA     uint16 = 1
	TypeNS    uint16 = 2
	TypeMD    uint16 = 3
	TypeMF    uint16 = 4
	TypeCNAME uint16 = 5
	TypeSOA   uint16 = 6
	TypeMB    uint16 = 7
	TypeMG    uint16 = 8
	TypeMR    uint16 = 9
	TypePTR   uint16 = 12
	TypeHINFO uint16 = 13
	TypeMX    uint16 = 15
	TypeTXT   uint16 = 16
	TypeAAAA  uint16 = 28
	TypeSRV   uint16 = 33
	TypeDNAME uint16 = 39
	TypeOPT   uint16 = 41
	TypeRRSIG uint16 = 46
	TypeSVCB  uint16 = 64
	TypeHTTPS uint16 = 65
	TypeTKEY  uint16 = 249
	TypeTSIG  uint16 = 250
	TypeIXFR  uint16 = 251
	TypeAXFR  uint16 = 252
	TypeMAILB uint16 = 253
	TypeMAILA uint16 = 254
	TypeANY   uint16 = 255

	ClassIN uint16 = 1
)

// ID returns the message's id. The message must have a whole header, as for
// the other header functions.
func ID(msg []byte) uint16 { return binary.BigEndian.Uint16(msg) }

// SetID sets the message's id.
func SetID(msg []byte, id uint16) { binary.BigEndian.PutUint16(msg, id) }

// Flags returns the header's flags word: QR, opcode, AA, TC, RD, RA, Z, AD,
// CD and the low four bits of the rcode.
func Flags(msg []byte) uint16 { return binary.BigEndian.Uint16(msg[2:]) }

// SetFlags sets the header's flags word.
func SetFlags(msg []byte, flags uint16) { binary.BigEndian.PutUint16(msg[2:], flags) }

// Counts returns the header's four counts: question, answer, authority,
// additional.
func Counts(msg []byte) (qd, an, ns, ar uint16) {
	return binary.BigEndian.Uint16(msg[4:]), binary.BigEndian.Uint16(msg[6:]),
		binary.BigEndian.Uint16(msg[8:]), binary.BigEndian.Uint16(msg[10:])
}

// SetCounts sets the header's four counts.
func SetCounts(msg []byte, qd, an, ns, ar uint16) {
	binary.BigEndian.PutUint16(msg[4:], qd)
	binary.BigEndian.PutUint16(msg[6:], an)
	binary.BigEndian.PutUint16(msg[8:], ns)
	binary.BigEndian.PutUint16(msg[10:], ar)
}
