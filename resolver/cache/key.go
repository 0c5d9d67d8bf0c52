package cache

import (
	"encoding/binary"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// keyDO and keyCD are bits of a key's last octet: answers differ by them (DO:
// RFC 3225; CD: RFC 4035 section 3.2.2).
const (
	keyDO = 1 << iota
	keyCD
)

// AppendKey appends the key of a question: the folded qname, qtype and qclass
// as they stand in a question, and one octet for DO and CD. The name may be
// folded already.
//
// The octets are the callers' to extend: a key with more octets behind these is
// another key for the same question, with an answer of its own.
func AppendKey(dst, name []byte, qtype, qclass uint16, do, cd bool) []byte {
	dst = dnswire.AppendFolded(dst, name)
	dst = binary.BigEndian.AppendUint16(dst, qtype)
	dst = binary.BigEndian.AppendUint16(dst, qclass)
	var bits byte
	if do {
		bits |= keyDO
	}
	if cd {
		bits |= keyCD
	}
	return append(dst, bits)
}

// asks reports whether key was made for the question of the answer resp.
func asks(key, resp []byte, r *dnswire.Response) bool {
	n := r.NameLen + 4
	return r.NameLen > 0 && len(key) > n && dnswire.EqualFold(key[:n], resp[dnswire.HeaderLen:dnswire.HeaderLen+n])
}
