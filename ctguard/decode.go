package ctguard

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Bits of CTA_STATUS (enum ip_conntrack_status).
const (
	statusSeenReply = 1 << 1 // IPS_SEEN_REPLY
	statusAssured   = 1 << 2 // IPS_ASSURED
	// IPS_OFFLOAD, Linux 4.16, and IPS_HW_OFFLOAD, 5.7
	statusOffload = 1<<14 | 1<<15
)

// attributes walks through netlink attributes.
type attributes struct {
	rest []byte
	bad  bool // they do not add up
}

// next returns the next attribute's type, without flags, and its payload.
func (a *attributes) next() (typ uint16, data []byte, ok bool) {
	if len(a.rest) == 0 {
		return 0, nil, false
	}
	n := 0
	if len(a.rest) >= unix.SizeofNlAttr {
		n = int(binary.NativeEndian.Uint16(a.rest))
	}
	if n < unix.SizeofNlAttr || n > len(a.rest) {
		a.rest, a.bad = nil, true
		return 0, nil, false
	}
	const typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	typ = binary.NativeEndian.Uint16(a.rest[2:]) & typeMask
	data = a.rest[unix.SizeofNlAttr:n]
	aligned := (n + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
	a.rest = a.rest[min(aligned, len(a.rest)):]
	return typ, data, true
}

// bigEndian reads a number of any size, 0 of none.
func bigEndian(b []byte) (n uint64) {
	for _, c := range b[:min(len(b), 8)] {
		n = n<<8 | uint64(c)
	}
	return n
}

// decode reads a flow from an event or an entry of a dump, without allocating:
// a busy node has tens of thousands of flows to its DNS Service. What it does
// not know, it skips.
func decode(h netlink.Header, data []byte) (Flow, error) {
	const nfgenmsg = 4
	if uint16(h.Type) != unix.NFNL_SUBSYS_CTNETLINK<<8 || len(data) < nfgenmsg {
		return Flow{}, fmt.Errorf("message of type %#x with %d bytes is no flow", uint16(h.Type), len(data))
	}
	var f Flow
	var timed, offloaded bool
	attrs := attributes{rest: data[nfgenmsg:]}
	for typ, b, ok := attrs.next(); ok; typ, b, ok = attrs.next() {
		switch typ {
		case ctaTupleOrig:
			f.Proto = decodeTuple(b, &f.Orig, &attrs.bad)
		case ctaTupleReply:
			decodeTuple(b, &f.Reply, &attrs.bad)
		case ctaStatus:
			status := bigEndian(b)
			f.SeenReply, f.Assured = status&statusSeenReply != 0, status&statusAssured != 0
			offloaded = status&statusOffload != 0
		case ctaTimeout:
			f.Remaining, timed = time.Duration(bigEndian(b))*time.Second, true
		case ctaZone:
			f.Zone = uint16(bigEndian(b))
		case ctaCountersOrig:
			f.Packets = bigEndian(child(b, ctaCountersPackets, &attrs.bad))
		case ctaCountersReply:
			f.Replies = bigEndian(child(b, ctaCountersPackets, &attrs.bad))
		case ctaTimestamp:
			if ns := bigEndian(child(b, ctaTimestampStart, &attrs.bad)); ns != 0 {
				f.Start = time.Unix(0, int64(ns))
			}
		}
	}
	if attrs.bad || !f.Orig.valid() || !f.Reply.valid() {
		return Flow{}, fmt.Errorf("flow without two whole tuples: %w", unix.EBADMSG)
	}
	f.Offloaded = offloaded || !timed // ctnetlink_dump_info leaves out a timer that does not run
	return f, nil
}

func (t Tuple) valid() bool { return t.Src.IsValid() && t.Dst.IsValid() }

// decodeTuple reads a tuple and returns its protocol.
func decodeTuple(b []byte, t *Tuple, bad *bool) (proto uint8) {
	var src, dst netip.Addr
	var sport, dport uint16
	attrs := attributes{rest: b}
	for typ, b, ok := attrs.next(); ok; typ, b, ok = attrs.next() {
		inner := attributes{rest: b}
		switch typ {
		case ctaTupleIP:
			for typ, b, ok := inner.next(); ok; typ, b, ok = inner.next() {
				switch typ {
				case ctaIPv4Src, ctaIPv6Src:
					src, _ = netip.AddrFromSlice(b)
				case ctaIPv4Dst, ctaIPv6Dst:
					dst, _ = netip.AddrFromSlice(b)
				}
			}
		case ctaTupleProto:
			for typ, b, ok := inner.next(); ok; typ, b, ok = inner.next() {
				switch typ {
				case ctaProtoNum:
					proto = uint8(bigEndian(b))
				case ctaProtoSrcPort:
					sport = uint16(bigEndian(b))
				case ctaProtoDstPort:
					dport = uint16(bigEndian(b))
				}
			}
		case ctaTupleZone:
			t.Zone = uint16(bigEndian(b))
		}
		*bad = *bad || inner.bad
	}
	*bad = *bad || attrs.bad
	t.Src, t.Dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return proto
}

// child finds an attribute among others.
func child(b []byte, want uint16, bad *bool) (found []byte) {
	attrs := attributes{rest: b}
	for typ, b, ok := attrs.next(); ok; typ, b, ok = attrs.next() {
		if typ == want {
			found = b
		}
	}
	*bad = *bad || attrs.bad
	return found
}
