package iptables

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A statement is one part of a rule: String is what nft would show, encode
// what the kernel is sent. A test holds one against the other. Linux 5.2 has
// them all; what is younger is said where it is used.
type statement interface {
	String() string
	encode(x *expressions)
}

// field is a part of a packet.
type field uint8

const (
	saddr field = iota
	daddr
	l4proto
	sport
	dport
)

// ipWord is what nft calls a family.
func ipWord(fam int) string { return [2]string{"ip", "ip6"}[fam] }

func (f field) text(fam int) string {
	switch f {
	case saddr:
		return ipWord(fam) + " saddr"
	case daddr:
		return ipWord(fam) + " daddr"
	case l4proto:
		return "meta l4proto"
	case sport:
		return "th sport"
	}
	return "th dport"
}

func keyText(fam int, fields []field) string {
	parts := make([]string, len(fields))
	for i, f := range fields {
		parts[i] = f.text(fam)
	}
	return strings.Join(parts, " . ")
}

// inSet matches packets whose fields are in a set.
type inSet struct {
	fam    int
	fields []field
	set    string
}

func (s inSet) String() string { return keyText(s.fam, s.fields) + " @" + s.set }

func (s inSet) encode(x *expressions) {
	x.loadKey(s.fam, s.fields)
	x.add(&expr.Lookup{SourceRegister: reg1, SetName: s.set})
}

// updateSet adds the fields to a set, or renews them there.
type updateSet struct {
	fam     int
	fields  []field
	set     string
	timeout time.Duration // zero: the set's own
	count   bool
}

func (s updateSet) String() string {
	text := "update @" + s.set + " { " + keyText(s.fam, s.fields)
	if s.timeout > 0 {
		text += " timeout " + durationText(s.timeout)
	}
	if s.count {
		text += " counter"
	}
	return text + " }"
}

func (s updateSet) encode(x *expressions) {
	x.loadKey(s.fam, s.fields)
	d := &expr.Dynset{SrcRegKey: reg1, SetName: s.set, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: s.timeout}
	if s.count {
		d.Exprs = []expr.Any{&expr.Counter{}}
	}
	x.add(d)
}

// isPort matches a port, or all others.
type isPort struct {
	field field
	port  uint16
	not   bool
}

func (s isPort) String() string {
	op := ""
	if s.not {
		op = "!= "
	}
	return fmt.Sprintf("%s %s%d", s.field.text(0), op, s.port)
}

func (s isPort) encode(x *expressions) {
	x.load(0, s.field, reg1)
	op := expr.CmpOpEq
	if s.not {
		op = expr.CmpOpNeq
	}
	x.compare(op, be16(s.port))
}

// isProto matches a transport protocol.
type isProto struct{ proto Proto }

func (s isProto) String() string { return "meta l4proto " + s.proto.String() }

func (s isProto) encode(x *expressions) {
	x.load(0, l4proto, reg1)
	x.compare(expr.CmpOpEq, []byte{byte(s.proto)})
}

// isAddr matches one address.
type isAddr struct {
	field field
	addr  netip.Addr
}

func (s isAddr) String() string { return s.field.text(family(s.addr)) + " " + s.addr.String() }

func (s isAddr) encode(x *expressions) {
	fam := family(s.addr)
	x.isFamily(fam)
	x.load(fam, s.field, reg1)
	x.compare(expr.CmpOpEq, s.addr.AsSlice())
}

// isMark matches packets whose mark has, within mask, the value.
type isMark struct{ mask, value uint32 }

func (s isMark) String() string { return fmt.Sprintf("meta mark & 0x%08x == 0x%08x", s.mask, s.value) }

func (s isMark) encode(x *expressions) {
	x.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1})
	x.mask(host32(s.mask))
	x.compare(expr.CmpOpEq, host32(s.value))
}

// setMark sets bits of the mark and leaves the others.
type setMark struct{ bits uint32 }

func (s setMark) String() string { return fmt.Sprintf("meta mark set meta mark | 0x%08x", s.bits) }

func (s setMark) encode(x *expressions) {
	x.add(
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: host32(^s.bits), Xor: host32(s.bits)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1, SourceRegister: true},
	)
}

// TCP flags that rules look at, RFC 9293 section 3.1.
const (
	flagSYN = 0x02
	flagRST = 0x04
	flagPSH = 0x08
	flagACK = 0x10
)

// isTCP matches TCP packets whose flags are, within mask, flags; or are not.
type isTCP struct {
	mask, flags byte
	not         bool
}

func (s isTCP) String() string {
	op := "=="
	if s.not {
		op = "!="
	}
	return fmt.Sprintf("tcp flags & (%s) %s %s", flagText(s.mask), op, flagText(s.flags))
}

func flagText(flags byte) string {
	var names []string
	for i, name := range []string{"fin", "syn", "rst", "psh", "ack"} {
		if flags&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " | ")
}

func (s isTCP) encode(x *expressions) {
	isProto{TCP}.encode(x)
	x.add(&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1})
	x.mask([]byte{s.mask})
	op := expr.CmpOpEq
	if s.not {
		op = expr.CmpOpNeq
	}
	x.compare(op, []byte{s.flags})
}

// leavesNode matches packets that do not leave over the loopback device,
// whose index is 1 in every network namespace (LOOPBACK_IFINDEX).
type leavesNode struct{}

func (leavesNode) String() string { return `oif != "lo"` }

func (leavesNode) encode(x *expressions) {
	x.add(&expr.Meta{Key: expr.MetaKeyOIF, Register: reg1})
	x.compare(expr.CmpOpNeq, host32(1))
}

// unlucky matches all but one of n DNS messages, n a power of two up to 256,
// by the low octet of their id, RFC 1035 section 4.1.1. Clients choose ids at
// random; one that does not is no worse than one that asks seldom. In a TCP
// segment the same octet belongs to the acknowledgment number, RFC 9293 section
// 3.1, which begins at random. The kernel's own random numbers (meta random)
// cost ten times as much.
type unlucky struct{ n uint32 }

func (s unlucky) String() string { return fmt.Sprintf("@th,72,8 & %#02x != 0x00", s.n-1) }

func (s unlucky) encode(x *expressions) {
	x.add(&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: 72 / 8, Len: 1})
	x.mask([]byte{byte(s.n - 1)})
	x.compare(expr.CmpOpNeq, []byte{0})
}

// hasSocket matches packets for which a transparent socket is open: bound to
// the destination, or connected. Linux 4.18, CONFIG_NFT_SOCKET.
type hasSocket struct{}

func (hasSocket) String() string { return "socket transparent 1" }

func (hasSocket) encode(x *expressions) {
	x.add(&expr.Socket{Key: expr.SocketKeyTransparent, Register: reg1})
	x.compare(expr.CmpOpEq, []byte{1})
}

// notrack keeps a packet out of connection tracking.
type notrack struct{}

func (notrack) String() string { return "notrack" }

func (notrack) encode(x *expressions) { x.add(&expr.Notrack{}) }

// hasPackets matches packets of flows that have had none, with accounting:
// none. It is there for what the kernel does to check it (nft_ct_get_init in
// net/netfilter/nft_ct.c): it turns accounting on.
type hasPackets struct{}

func (hasPackets) String() string { return "ct packets 0" }

func (hasPackets) encode(x *expressions) {
	x.add(&expr.Ct{Key: expr.CtKeyPKTS, Register: reg1})
	x.compare(expr.CmpOpEq, make([]byte, 8))
}

// verdict ends a rule.
type verdict struct {
	kind  expr.VerdictKind
	chain string
}

func jump(chain string) verdict { return verdict{expr.VerdictJump, chain} }
func goTo(chain string) verdict { return verdict{expr.VerdictGoto, chain} }
func done() verdict             { return verdict{kind: expr.VerdictAccept} }
func back() verdict             { return verdict{kind: expr.VerdictReturn} }

func (s verdict) String() string {
	switch s.kind {
	case expr.VerdictJump:
		return "jump " + s.chain
	case expr.VerdictGoto:
		return "goto " + s.chain
	case expr.VerdictReturn:
		return "return"
	default:
		return "accept"
	}
}

func (s verdict) encode(x *expressions) { x.add(&expr.Verdict{Kind: s.kind, Chain: s.chain}) }

// Directions of a flow, include/uapi/linux/netfilter/nf_conntrack_tuple_common.h.
const (
	ctOriginal = 0
	ctReply    = 1
)

// setZone puts the original direction of a new flow into a conntrack zone; its
// replies stay in zone 0, where they arrive.
type setZone struct{ zone uint16 }

func (s setZone) String() string { return fmt.Sprintf("ct original zone set %d", s.zone) }

func (s setZone) encode(x *expressions) {
	x.add(&expr.Immediate{Register: reg1, Data: host16(s.zone)})
	x.raw("ct",
		netlink.Attribute{Type: unix.NFTA_CT_KEY, Data: be32(unix.NFT_CT_ZONE)},
		netlink.Attribute{Type: unix.NFTA_CT_DIRECTION, Data: []byte{ctOriginal}},
		netlink.Attribute{Type: unix.NFTA_CT_SREG, Data: be32(reg1)},
	)
}

// isReplyInZone matches replies of flows whose original direction is in a zone.
type isReplyInZone struct{ zone uint16 }

func (s isReplyInZone) String() string {
	return fmt.Sprintf("ct direction reply ct original zone %d", s.zone)
}

func (s isReplyInZone) encode(x *expressions) {
	x.add(&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1})
	x.compare(expr.CmpOpEq, []byte{ctReply})
	x.raw("ct",
		netlink.Attribute{Type: unix.NFTA_CT_KEY, Data: be32(unix.NFT_CT_ZONE)},
		netlink.Attribute{Type: unix.NFTA_CT_DIRECTION, Data: []byte{ctOriginal}},
		netlink.Attribute{Type: unix.NFTA_CT_DREG, Data: be32(reg1)},
	)
	x.compare(expr.CmpOpEq, host16(s.zone))
}

// setAddr writes an address into the header and corrects the checksums of
// header and transport.
type setAddr struct {
	field field
	addr  netip.Addr
}

func (s setAddr) String() string {
	return s.field.text(family(s.addr)) + " set " + s.addr.String()
}

// The checksum of the IPv4 header, RFC 791 section 3.1.
const ipv4ChecksumOffset = 10

func (s setAddr) encode(x *expressions) {
	fam := family(s.addr)
	offset := [2]uint32{12, 8}[fam]
	if s.field == daddr {
		offset += addrSize(fam)
	}
	kind, at := uint32(unix.NFT_PAYLOAD_CSUM_INET), uint32(ipv4ChecksumOffset)
	if fam == 1 { // IPv6 has no header checksum
		kind, at = unix.NFT_PAYLOAD_CSUM_NONE, 0
	}
	x.add(&expr.Immediate{Register: reg1, Data: s.addr.AsSlice()})
	x.raw("payload",
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_SREG, Data: be32(reg1)},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_BASE, Data: be32(unix.NFT_PAYLOAD_NETWORK_HEADER)},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_OFFSET, Data: be32(offset)},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_LEN, Data: be32(addrSize(fam))},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_CSUM_TYPE, Data: be32(kind)},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_CSUM_OFFSET, Data: be32(at)},
		netlink.Attribute{Type: unix.NFTA_PAYLOAD_CSUM_FLAGS, Data: be32(unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR)},
	)
}

// durationText writes a duration as nft does: 1s500ms, 5m.
func durationText(d time.Duration) string {
	var b strings.Builder
	for _, u := range []struct {
		size time.Duration
		name string
	}{{time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}, {time.Millisecond, "ms"}} {
		if n := d / u.size; n > 0 {
			fmt.Fprintf(&b, "%d%s", n, u.name)
			d -= n * u.size
		}
	}
	return b.String()
}
