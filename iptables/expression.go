package iptables

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// inet is the family of our tables: one set of chains for IPv4 and IPv6.
const inet = unix.NFPROTO_INET

// reg1 is the register that every single value goes through.
const reg1 = unix.NFT_REG_1

// expressions collects what the kernel executes for a rule, encoded.
type expressions struct {
	list []netlink.Attribute
	err  error
	fam  *int // the family that the rule is restricted to already
}

// add encodes with package expr.
func (x *expressions) add(exprs ...expr.Any) {
	for _, e := range exprs {
		b, err := expr.Marshal(inet, e)
		x.append(b, err)
	}
}

// raw encodes an expression that package expr cannot: it drops the direction
// of a conntrack zone and the checksum flags of an IPv6 header write.
func (x *expressions) raw(name string, attrs ...netlink.Attribute) {
	data, err := netlink.MarshalAttributes(attrs)
	if err == nil {
		data, err = netlink.MarshalAttributes([]netlink.Attribute{
			{Type: unix.NFTA_EXPR_NAME, Data: cstring(name)},
			{Type: unix.NLA_F_NESTED | unix.NFTA_EXPR_DATA, Data: data},
		})
	}
	x.append(data, err)
}

func (x *expressions) append(b []byte, err error) {
	if err != nil && x.err == nil {
		x.err = err
	}
	x.list = append(x.list, netlink.Attribute{Type: unix.NLA_F_NESTED | unix.NFTA_LIST_ELEM, Data: b})
}

// load puts a packet field into a register.
func (x *expressions) load(fam int, f field, register uint32) {
	switch f {
	case saddr, daddr:
		// RFC 791 section 3.1, RFC 8200 section 3.
		offset, size := [2]uint32{12, 8}[fam], addrSize(fam)
		if f == daddr {
			offset += size
		}
		x.add(&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size})
	case l4proto:
		x.add(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register})
	case sport:
		x.add(&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2})
	case dport:
		x.add(&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
	}
}

// loadKey puts fields next to each other, as the key of a set. A key with an
// address restricts the rule to packets of that family.
func (x *expressions) loadKey(fam int, fields []field) {
	x.isFamily(fam)
	word := uint32(0)
	for _, f := range fields {
		// Register 1 is the first of the 32-bit registers, whose numbers
		// start at NFT_REG32_00 (Linux 4.1).
		x.load(fam, f, unix.NFT_REG32_00+word)
		word++
		if f == saddr || f == daddr {
			word += addrSize(fam)/4 - 1
		}
	}
}

// isFamily restricts a rule of an inet table to one family, once.
func (x *expressions) isFamily(fam int) {
	if x.fam != nil && *x.fam == fam {
		return
	}
	x.fam = &fam
	x.add(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1})
	x.compare(expr.CmpOpEq, []byte{[2]byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}[fam]})
}

func (x *expressions) compare(op expr.CmpOp, value []byte) {
	x.add(&expr.Cmp{Op: op, Register: reg1, Data: value})
}

// mask keeps the bits of register 1 that are set in m.
func (x *expressions) mask(m []byte) {
	x.add(&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: uint32(len(m)), Mask: m, Xor: make([]byte, len(m))})
}

// addrSize is the size of an address in octets.
func addrSize(fam int) uint32 { return [2]uint32{4, 16}[fam] }

// be and host encode numbers: netlink attributes are big-endian, registers
// that hold kernel numbers have the machine's order.
func be16(v uint16) []byte   { return binary.BigEndian.AppendUint16(nil, v) }
func be32(v uint32) []byte   { return binary.BigEndian.AppendUint32(nil, v) }
func be64(v uint64) []byte   { return binary.BigEndian.AppendUint64(nil, v) }
func host16(v uint16) []byte { return binary.NativeEndian.AppendUint16(nil, v) }
func host32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func cstring(s string) []byte { return append([]byte(s), 0) }
