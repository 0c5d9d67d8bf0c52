package main

import "encoding/binary"

const (
	headerLen  = 12
	maxNameLen = 255 // octets of a name, the root's among them (RFC 1035 section 3.1)
	typeA      = 1
	typeOPT    = 41
)

// answerer makes a reply function that answers any query in place: A with one
// address, other types with an SOA (RFC 2308, so that caches may keep the NODATA).
// What is no plain query gets no answer.
func answerer(ttl uint32) func(buf []byte, n int) int {
	// Both name the question by a compression pointer to offset 12.
	address := []byte{0xc0, headerLen, 0, typeA, 0, 1, 0, 0, 0, 0, 0, 4, 192, 0, 2, 1}
	binary.BigEndian.PutUint32(address[6:], ttl)
	soa := []byte{0, 0, 6, 0, 1, 0, 0, 0, 0, 0, 22, 0, 0} // owner, MNAME and RNAME: the root
	binary.BigEndian.PutUint32(soa[5:], ttl)
	for _, v := range []uint32{1, 3600, 600, 86400, ttl} { // serial, refresh, retry, expire, minimum
		soa = binary.BigEndian.AppendUint32(soa, v)
	}
	opt := []byte{0, 0, typeOPT, 0x04, 0xd0, 0, 0, 0, 0, 0, 0} // size 1232

	return func(buf []byte, n int) int {
		end, ok := questionEnd(buf[:n])
		if !ok {
			return 0
		}
		qtype := binary.BigEndian.Uint16(buf[end-4:])
		hasOPT := binary.BigEndian.Uint16(buf[10:]) == 1 && n >= end+len(opt) &&
			buf[end] == 0 && binary.BigEndian.Uint16(buf[end+1:]) == typeOPT

		buf[2] = buf[2]&0x01 | 0x80 // QR; opcode 0; RD as asked
		buf[3] = 0x80               // RA: the stand-in plays a recursive server
		clear(buf[6:headerLen])
		out := buf[:end]
		if qtype == typeA {
			buf[7] = 1
			out = append(out, address...)
		} else {
			buf[9] = 1
			out = append(out, soa...)
		}
		if hasOPT {
			buf[11] = 1
			out = append(out, opt...)
		}
		return len(out)
	}
}

// questionEnd is where the one question of a query ends.
func questionEnd(msg []byte) (int, bool) {
	if len(msg) < headerLen || msg[2]&0xf8 != 0 || binary.BigEndian.Uint16(msg[4:]) != 1 {
		return 0, false
	}
	for i := headerLen; i < len(msg); i += 1 + int(msg[i]) {
		if msg[i] > 63 || i-headerLen >= maxNameLen {
			return 0, false
		}
		if msg[i] == 0 {
			return i + 5, i+5 <= len(msg)
		}
	}
	return 0, false
}
