package dnswire

import "encoding/binary"

// EDNS option codes.
const (
	optNSID      = 3  // RFC 5001
	optCookie    = 10 // RFC 7873
	optKeepalive = 11 // RFC 7828
	optPadding   = 12 // RFC 7830
	optEDE       = 15 // RFC 8914
)

// cutOption reads the first EDNS option of an OPT record's RDATA (RFC 6891
// section 6.1.2): its code, its length without the option header, and what
// follows it.
func cutOption(data []byte) (code uint16, n int, rest []byte, ok bool) {
	if len(data) < 4 {
		return 0, 0, nil, false
	}
	code, n = binary.BigEndian.Uint16(data), int(binary.BigEndian.Uint16(data[2:]))
	if len(data) < 4+n {
		return 0, 0, nil, false
	}
	return code, n, data[4+n:], true
}

// optionChecked reports whether n octets are a well-formed value of the option,
// in an answer. False is for those whose format is not known here, too.
func optionChecked(code uint16, n int) bool {
	switch code {
	case optNSID, optCookie, optPadding:
		return true
	case optKeepalive:
		return n == 0 || n == 2
	case optEDE:
		return n >= 2
	}
	return false
}
