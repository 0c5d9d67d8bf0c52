package dnswire

import (
	"bytes"
	"errors"
)

// errName covers every way in which a name can be malformed: cut short, a
// label type that does not exist, a pointer that does not point backwards, or
// more than 255 octets.
var errName = errors.New("malformed name")

// fold maps an octet to lower case (RFC 4343: ASCII only). Length octets are
// at most 63 and so never letters: a whole wire-form name can be folded octet
// by octet.
func fold(c byte) byte {
	if c-'A' < 26 {
		return c + ('a' - 'A')
	}
	return c
}

// AppendFolded appends the wire-form name in lower case.
func AppendFolded(dst, name []byte) []byte {
	n := len(dst)
	dst = append(dst, name...)
	for i := n; i < len(dst); i++ {
		dst[i] = fold(dst[i])
	}
	return dst
}

// EqualFold reports whether two uncompressed wire-form names (or questions)
// are equal but for the case of ASCII letters.
func EqualFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] && fold(a[i]) != fold(b[i]) {
			return false
		}
	}
	return true
}

// plainNameLen returns the length of the uncompressed name at off, root octet
// included.
func plainNameLen(msg []byte, off int) (int, error) {
	for n := off; n < len(msg); {
		c := int(msg[n])
		if c == 0 {
			if n+1-off > MaxNameLen {
				return 0, errName
			}
			return n + 1 - off, nil
		}
		if c > maxLabel {
			return 0, errName
		}
		n += 1 + c
		if n-off >= MaxNameLen {
			return 0, errName
		}
	}
	return 0, errName
}

// nameEnd checks the possibly compressed name at off, whole and through its
// pointers, and returns the offset of what follows it. A pointer must point
// before the label sequence in which it stands, so that every hop goes
// strictly backwards and the walk ends (RFC 1035 section 4.1.4: "a prior
// occurrence").
func nameEnd(msg []byte, off int) (int, error) {
	end, total, floor := 0, 0, off
	for off < len(msg) {
		c := int(msg[off])
		switch {
		case c == 0:
			if total+1 > MaxNameLen {
				return 0, errName
			}
			if end == 0 {
				end = off + 1
			}
			return end, nil
		case c <= maxLabel:
			off += 1 + c
			total += 1 + c
			if total >= MaxNameLen {
				return 0, errName
			}
		case c >= 0xc0:
			if off+1 >= len(msg) {
				return 0, errName
			}
			if end == 0 {
				end = off + 2
			}
			to := (c&0x3f)<<8 | int(msg[off+1])
			if to >= floor || to < HeaderLen {
				return 0, errName
			}
			off, floor = to, to
		default:
			return 0, errName
		}
	}
	return 0, errName
}

// AppendName appends the name at off, decompressed and folded, to dst. The
// name must have been accepted before (by ParseQuery or ParseResponse); of a
// malformed one it appends as much as there is.
func AppendName(dst, msg []byte, off int) []byte {
	for n := 0; off < len(msg) && n <= MaxNameLen; n++ {
		c := int(msg[off])
		if c >= 0xc0 {
			if off+1 >= len(msg) {
				return dst
			}
			off = (c&0x3f)<<8 | int(msg[off+1])
			continue
		}
		if c == 0 {
			return append(dst, 0)
		}
		if off+1+c > len(msg) {
			return dst
		}
		dst = AppendFolded(dst, msg[off:off+1+c])
		off += 1 + c
	}
	return dst
}

// NameEqual reports whether the two accepted names at offsets a and b of msg
// are the same but for case.
func NameEqual(msg []byte, a, b int) bool {
	if a == b {
		return true
	}
	if int(msg[a]) >= 0xc0 && int(msg[b]) >= 0xc0 && msg[a] == msg[b] && msg[a+1] == msg[b+1] {
		return true
	}
	var x, y [MaxNameLen + 1]byte
	return bytes.Equal(AppendName(x[:0], msg, a), AppendName(y[:0], msg, b))
}

// IsSubdomain reports whether child, a folded wire-form name, is parent or
// below it.
func IsSubdomain(child, parent []byte) bool {
	for off := 0; off < len(child); off += 1 + int(child[off]) {
		if len(child)-off <= len(parent) {
			return bytes.Equal(child[off:], parent)
		}
	}
	return false
}

// LabelCount returns the number of labels of a wire-form name, the root not
// counted.
func LabelCount(name []byte) int {
	n := 0
	for off := 0; off < len(name) && name[off] != 0; off += 1 + int(name[off]) {
		n++
	}
	return n
}
