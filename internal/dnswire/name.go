package dnswire

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// maxPointers is how many compression pointers a name may go through: one after
// every label but the last of the longest chain of labels that fits. More are
// pointers to pointers, which no server writes; miekg/dns stops here too.
const maxPointers = (MaxNameLen+1)/2 - 2

// errName covers every way in which a name can be malformed: cut short, a
// label type that does not exist, a pointer to anything but labels that lie
// wholly before it, more pointers than a name can need, or more than 255 octets.
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

// foldWord is fold of eight octets at once. An octet's upper bit is set in the sums
// where its lower seven are 'A' or more, and more than 'Z': no sum reaches into the
// next octet.
func foldWord(w uint64) uint64 {
	const ones = 0x01_01_01_01_01_01_01_01
	low := w & (0x7f * ones)
	from, past := low+(0x80-'A')*ones, low+(0x7f-'Z')*ones
	letters := (from ^ past) &^ w & (0x80 * ones)
	return w | letters>>2 // 0x20 is what lower case has more
}

// AppendFolded appends the wire-form name in lower case.
func AppendFolded(dst, name []byte) []byte {
	n := len(dst)
	dst = append(dst, name...)
	folded := dst[n:]
	if len(folded) < 8 {
		for i, c := range folded {
			folded[i] = fold(c)
		}
		return dst
	}
	for i := 0; ; i += 8 {
		// The last word ends with the name. It may have octets that are folded
		// already, to which folding does nothing.
		i = min(i, len(folded)-8)
		w := folded[i : i+8]
		binary.NativeEndian.PutUint64(w, foldWord(binary.NativeEndian.Uint64(w)))
		if i == len(folded)-8 {
			return dst
		}
	}
}

// EqualFold reports whether two uncompressed wire-form names are equal but for
// the case of ASCII letters. What follows the root octet must be equal to the
// bit, so that whole questions can be compared: in the type of an HTTPS question
// (65) there is an "A" that must not match an "a".
func EqualFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for len(a) > 0 && a[0] != 0 {
		n := 1 + int(a[0])
		if n > len(a) || a[0] != b[0] || !equalLetters(a[1:n], b[1:n]) {
			return false
		}
		a, b = a[n:], b[n:]
	}
	return bytes.Equal(a, b)
}

// equalLetters reports whether two labels of one length are equal but for case.
func equalLetters(a, b []byte) bool {
	for i, c := range a {
		if c != b[i] && fold(c) != fold(b[i]) {
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
			return n + 1 - off, nil
		}
		n += 1 + c
		if c > maxLabel || n-off >= MaxNameLen { // the root octet must fit, too
			return 0, errName
		}
	}
	return 0, errName
}

// nameEnd checks the possibly compressed name at off, whole and through its
// pointers, and returns the offset of what follows it.
//
// A pointer must lead to "a prior occurrence" of a name (RFC 1035 section 4.1.4),
// which is taken by the letter: the labels that it leads to start and end before
// the labels in which the pointer stands. So every hop goes strictly backwards
// and the walk ends, after at most 127 labels and maxPointers pointers; and no
// name needs octets behind its own end, so that an answer can be cut behind any
// of its records.
func nameEnd(msg []byte, off int) (int, error) {
	end, total, pointers := 0, 0, 0
	start, limit := off, len(msg) // of the labels
	for off < limit {
		c := int(msg[off])
		switch {
		case c == 0:
			if end == 0 {
				end = off + 1
			}
			return end, nil
		case c <= maxLabel:
			off += 1 + c
			total += 1 + c
			if total >= MaxNameLen { // the root octet must fit, too
				return 0, errName
			}
		case c >= 0xc0:
			if off+1 >= limit {
				return 0, errName
			}
			if end == 0 {
				end = off + 2
			}
			to := (c&0x3f)<<8 | int(msg[off+1])
			if pointers++; to < HeaderLen || pointers > maxPointers {
				return 0, errName
			}
			off, start, limit = to, to, start // not before limit: the loop ends
		default:
			return 0, errName
		}
	}
	return 0, errName
}

// label returns the offset of the first label (or the root octet) of the name at
// off: where its pointers lead to. It is len(msg) if they do not lead backwards.
func label(msg []byte, off int) int {
	for off+1 < len(msg) && msg[off] >= 0xc0 {
		to := int(msg[off]&0x3f)<<8 | int(msg[off+1])
		if to >= off {
			return len(msg)
		}
		off = to
	}
	return off
}

// AppendName appends the name at off, decompressed and folded, to dst. The
// name must have been accepted before (by ParseQuery or ParseResponse); of a
// malformed one it appends as much as there is, at most 127 labels.
func AppendName(dst, msg []byte, off int) []byte {
	for range MaxNameLen/2 + 1 {
		off = label(msg, off)
		if off >= len(msg) {
			break
		}
		next := off + 1 + int(msg[off])
		if next > len(msg) {
			break
		}
		dst = AppendFolded(dst, msg[off:next])
		if next == off+1 {
			break
		}
		off = next
	}
	return dst
}

// NameEqual reports whether the two accepted names at offsets a and b of msg
// are the same but for case.
func NameEqual(msg []byte, a, b int) bool {
	for range MaxNameLen/2 + 1 {
		a, b = label(msg, a), label(msg, b)
		if a == b {
			return true // from here on the same octets
		}
		if max(a, b) >= len(msg) || msg[a] != msg[b] {
			return false
		}
		n := 1 + int(msg[a])
		if n == 1 {
			return true
		}
		if max(a, b)+n > len(msg) || !equalLetters(msg[a+1:a+n], msg[b+1:b+n]) {
			return false
		}
		a, b = a+n, b+n
	}
	return false
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
