package ctguard

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"
)

// Message types of ctnetlink (enum cntl_msg_types).
const (
	ctGet    netfilter.MessageType = 1 // IPCTNL_MSG_CT_GET
	ctDelete netfilter.MessageType = 2 // IPCTNL_MSG_CT_DELETE
)

// Attributes of ctnetlink, of enum ctattr_type, ctattr_tuple, ctattr_ip,
// ctattr_l4proto and ctattr_filter.
const (
	ctaTupleOrig     = 1  // CTA_TUPLE_ORIG
	ctaTupleReply    = 2  // CTA_TUPLE_REPLY
	ctaStatus        = 3  // CTA_STATUS
	ctaTimeout       = 7  // CTA_TIMEOUT
	ctaCountersOrig  = 9  // CTA_COUNTERS_ORIG
	ctaCountersReply = 10 // CTA_COUNTERS_REPLY
	ctaZone          = 18 // CTA_ZONE
	ctaTimestamp     = 20 // CTA_TIMESTAMP
	ctaFilter        = 25 // CTA_FILTER, Linux 5.8

	ctaTupleIP    = 1 // CTA_TUPLE_IP
	ctaTupleProto = 2 // CTA_TUPLE_PROTO
	ctaTupleZone  = 3 // CTA_TUPLE_ZONE

	ctaIPv4Src = 1 // CTA_IP_V4_SRC
	ctaIPv4Dst = 2 // CTA_IP_V4_DST
	ctaIPv6Src = 3 // CTA_IP_V6_SRC
	ctaIPv6Dst = 4 // CTA_IP_V6_DST

	ctaProtoNum     = 1 // CTA_PROTO_NUM
	ctaProtoSrcPort = 2 // CTA_PROTO_SRC_PORT
	ctaProtoDstPort = 3 // CTA_PROTO_DST_PORT

	ctaCountersPackets = 1 // CTA_COUNTERS_PACKETS
	ctaTimestampStart  = 1 // CTA_TIMESTAMP_START

	ctaFilterOrigFlags  = 1 // CTA_FILTER_ORIG_FLAGS
	ctaFilterReplyFlags = 2 // CTA_FILTER_REPLY_FLAGS
)

// Bits of CTA_FILTER_*_FLAGS: which parts of the tuple count (enum
// ctattr_filter's CTA_FILTER_F_*, in the kernel's own header).
const (
	filterIPSrc    = 1 << 0 // CTA_FILTER_F_CTA_IP_SRC
	filterIPDst    = 1 << 1 // CTA_FILTER_F_CTA_IP_DST
	filterProtoNum = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterSrcPort  = 1 << 4 // CTA_FILTER_F_CTA_PROTO_SRC_PORT
	filterDstPort  = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

func attr(typ uint16, data []byte) netfilter.Attribute {
	return netfilter.Attribute{Type: typ, Data: data}
}

func nest(typ uint16, children ...netfilter.Attribute) netfilter.Attribute {
	return netfilter.Attribute{Type: typ, Nested: true, Children: children}
}

// side is one end of a tuple, which may lack its address or be left out.
type side struct {
	addr netip.Addr
	port uint16
}

func endOf(a netip.AddrPort) side { return side{a.Addr(), a.Port()} }

// tuple encodes what is given of a UDP tuple.
func tuple(typ uint16, src, dst side, zone uint16) netfilter.Attribute {
	var ips []netfilter.Attribute
	proto := []netfilter.Attribute{attr(ctaProtoNum, []byte{unix.IPPROTO_UDP})}
	for _, s := range []struct {
		side
		v4, v6, port uint16
	}{
		{src, ctaIPv4Src, ctaIPv6Src, ctaProtoSrcPort},
		{dst, ctaIPv4Dst, ctaIPv6Dst, ctaProtoDstPort},
	} {
		switch {
		case s.addr.Is4():
			ips = append(ips, attr(s.v4, s.addr.AsSlice()))
		case s.addr.IsValid():
			ips = append(ips, attr(s.v6, s.addr.AsSlice()))
		}
		if s.side.port != 0 {
			proto = append(proto, attr(s.port, netfilter.Uint16Bytes(s.side.port)))
		}
	}
	t := nest(typ)
	if len(ips) > 0 {
		t.Children = append(t.Children, nest(ctaTupleIP, ips...))
	}
	t.Children = append(t.Children, nest(ctaTupleProto, proto...))
	if zone != 0 {
		t.Children = append(t.Children, attr(ctaTupleZone, netfilter.Uint16Bytes(zone)))
	}
	return t
}

// exact tells whether the kernel can compare the match's addresses. For IPv6
// it cannot: it takes an address that differs for one that is equal, and the
// reverse (seen on Linux 6.18). So IPv6 addresses are never sent in a filter.
func (m Match) exact() bool { return m.Dst.Addr().Is4() }

// attributes encodes the match for the kernel, as far as the kernel can be
// trusted with it. The tuples come with the filter in every case: a kernel
// that does not know CTA_FILTER takes a DELETE without a tuple for an order to
// empty the table, but refuses one with an incomplete tuple.
func (m Match) attributes() []netfilter.Attribute {
	dst, src := endOf(m.Dst), endOf(m.Src)
	orig, reply := uint32(filterProtoNum|filterDstPort), uint32(filterProtoNum|filterSrcPort)
	if m.exact() {
		orig, reply = orig|filterIPDst, reply|filterIPSrc
	} else {
		dst.addr, src.addr = netip.Addr{}, netip.Addr{}
	}
	if m.anyAddr() {
		dst.addr, orig = netip.Addr{}, orig&^filterIPDst
	}
	// Alone among netfilter's numbers, the flags are in host order.
	flag := func(typ uint16, flags uint32) netfilter.Attribute {
		return attr(typ, binary.NativeEndian.AppendUint32(nil, flags))
	}
	attrs := []netfilter.Attribute{tuple(ctaTupleOrig, side{}, dst, 0)}
	flags := []netfilter.Attribute{flag(ctaFilterOrigFlags, orig)}
	if m.Src.IsValid() {
		attrs = append(attrs, tuple(ctaTupleReply, src, side{}, 0))
		flags = append(flags, flag(ctaFilterReplyFlags, reply))
	}
	return append(attrs, nest(ctaFilter, flags...))
}

// selects tells whether the kernel, asked for m, can have meant f.
func (m Match) selects(f Flow) bool {
	if m.exact() {
		return m.Matches(f)
	}
	return f.Proto == unix.IPPROTO_UDP && f.Orig.Dst.Addr().Is6() && f.Orig.Dst.Port() == m.Dst.Port()
}

func (m Match) family() netfilter.ProtoFamily { return familyOf(m.Dst.Addr()) }

func familyOf(a netip.Addr) netfilter.ProtoFamily {
	if a.Is4() {
		return netfilter.ProtoIPv4
	}
	return netfilter.ProtoIPv6
}

func request(typ netfilter.MessageType, family netfilter.ProtoFamily, flags netlink.HeaderFlags, attrs []netfilter.Attribute) (netlink.Message, error) {
	return netfilter.MarshalNetlink(netfilter.Header{
		SubsystemID: netfilter.NFSubsysCTNetlink,
		MessageType: typ,
		Family:      family,
		Flags:       netlink.Request | flags,
	}, attrs)
}

// dumpRequest asks for all flows that m selects (CTA_FILTER, Linux 5.8; older
// kernels send the whole table of the family).
func dumpRequest(m Match) (netlink.Message, error) {
	return request(ctGet, m.family(), netlink.Dump, m.attributes())
}

// dumpAllRequest asks for the whole table of a family.
func dumpAllRequest(family netfilter.ProtoFamily) (netlink.Message, error) {
	return request(ctGet, family, netlink.Dump, nil)
}

// deleteRequest removes the flow with f's reply tuple.
func deleteRequest(f Flow) (netlink.Message, error) {
	attrs := []netfilter.Attribute{tuple(ctaTupleReply, endOf(f.Reply.Src), endOf(f.Reply.Dst), f.Reply.Zone)}
	if f.Zone != 0 {
		attrs = append(attrs, attr(ctaZone, netfilter.Uint16Bytes(f.Zone)))
	}
	return request(ctDelete, familyOf(f.Reply.Src.Addr()), 0, attrs)
}

// deleteMatchingRequest removes all flows that m selects. The kernel has to
// compare both addresses: nobody looks at the flows again.
func deleteMatchingRequest(m Match) (netlink.Message, error) {
	if !m.Dst.IsValid() || m.anyAddr() || m.Dst.Port() == 0 || !m.Src.IsValid() {
		return netlink.Message{}, fmt.Errorf("match %v => %v is too wide to delete by", m.Dst, m.Src)
	}
	if !m.exact() {
		return netlink.Message{}, fmt.Errorf("delete by IPv6 filter: %w", ErrNotSupported)
	}
	return request(ctDelete, m.family(), netlink.Acknowledge, m.attributes())
}
