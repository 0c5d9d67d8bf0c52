package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// proxyTable is the name that kube-proxy's nftables mode uses.
const proxyTable = "kube-proxy"

// ICMP codes of "port unreachable", RFC 792 and RFC 4443 section 3.1.
const (
	icmpPortUnreachable   = 3
	icmpv6PortUnreachable = 4
)

// writeTable puts the whole table of one family into the connection's batch.
// It replaces the table instead of changing it: the batch is one transaction,
// so packets see either the old table or the new one.
//
//	table ip kube-proxy {
//	  chain nat-prerouting   { type nat hook prerouting priority dstnat; jump services }
//	  chain nat-output       { type nat hook output priority dstnat; jump services }
//	  chain filter-forward   { type filter hook forward priority dstnat - 10; ct state new jump reject-empty }
//	  chain filter-output    { type filter hook output priority dstnat - 10; ct state new jump reject-empty }
//	  chain services         { ip daddr VIP meta l4proto udp th dport 53 goto service-kube-dns; same for tcp }
//	  chain service-kube-dns { numgen random mod 2 vmap { 0 : goto kube-dns-0, 1 : goto kube-dns-1 } }
//	  chain kube-dns-0       { dnat to 10.244.0.2:53 }
//	  chain reject-empty     { the match of a Service without endpoints; reject }
//	}
func writeTable(conn *nftables.Conn, family nftables.TableFamily, services []*Service) error {
	w := &tableWriter{conn: conn, table: &nftables.Table{Name: proxyTable, Family: family}}
	conn.AddTable(w.table) // so that the deletion finds one
	conn.DelTable(w.table)
	conn.AddTable(w.table)

	dispatch := w.chain("services")
	rejects := w.chain("reject-empty")
	for _, s := range services {
		w.service(dispatch, rejects, s)
	}
	w.hook("nat-prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, -100, dispatch)
	w.hook("nat-output", nftables.ChainTypeNAT, nftables.ChainHookOutput, -100, dispatch)
	w.hook("filter-forward", nftables.ChainTypeFilter, nftables.ChainHookForward, -110, rejects, stateNew()...)
	w.hook("filter-output", nftables.ChainTypeFilter, nftables.ChainHookOutput, -110, rejects, stateNew()...)
	return w.err
}

// tableWriter fills one table.
type tableWriter struct {
	conn  *nftables.Conn
	table *nftables.Table
	err   error
}

func (w *tableWriter) is4() bool { return w.table.Family == nftables.TableFamilyIPv4 }

// chain adds a regular chain.
func (w *tableWriter) chain(name string) *nftables.Chain {
	return w.conn.AddChain(&nftables.Chain{Name: name, Table: w.table})
}

// hook adds a base chain that jumps to another.
func (w *tableWriter) hook(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority nftables.ChainPriority, to *nftables.Chain, match ...expr.Any) {
	base := w.conn.AddChain(&nftables.Chain{
		Name: name, Table: w.table, Type: kind, Hooknum: hook, Priority: new(priority),
	})
	w.rule(base, match, verdict(expr.VerdictJump, to.Name))
}

func (w *tableWriter) rule(chain *nftables.Chain, parts ...[]expr.Any) {
	var exprs []expr.Any
	for _, p := range parts {
		exprs = append(exprs, p...)
	}
	w.conn.AddRule(&nftables.Rule{Table: w.table, Chain: chain, Exprs: exprs})
}

// service adds what one Service needs in this family.
func (w *tableWriter) service(dispatch, rejects *nftables.Chain, s *Service) {
	endpoints := ofFamily(s.endpoints, w.is4())
	var balance *nftables.Chain
	if len(endpoints) > 0 {
		balance = w.balancer(s.name, endpoints)
	}
	for _, frontend := range ofFamily(s.frontends, w.is4()) {
		for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			match := matchFrontend(frontend, proto)
			if balance != nil {
				w.rule(dispatch, match, verdict(expr.VerdictGoto, balance.Name))
			} else {
				w.rule(rejects, match, w.reject())
			}
		}
	}
}

// balancer adds the chain that gives each new flow to a random endpoint.
func (w *tableWriter) balancer(name string, endpoints []netip.AddrPort) *nftables.Chain {
	choice := &nftables.Set{
		Table: w.table, Anonymous: true, Constant: true, IsMap: true,
		KeyType: nftables.TypeInteger, DataType: nftables.TypeVerdict,
	}
	var elements []nftables.SetElement
	for i, ep := range endpoints {
		to := w.chain(fmt.Sprintf("%s-%d", name, i))
		w.rule(to, w.dnat(ep))
		elements = append(elements, nftables.SetElement{
			Key:         binaryutil.NativeEndian.PutUint32(uint32(i)),
			VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: to.Name},
		})
	}
	if err := w.conn.AddSet(choice, elements); err != nil && w.err == nil {
		w.err = fmt.Errorf("build the endpoint map of %s: %w", name, err)
	}
	balance := w.chain("service-" + name)
	w.rule(balance, []expr.Any{
		&expr.Numgen{Register: unix.NFT_REG_1, Modulus: uint32(len(endpoints)), Type: unix.NFT_NG_RANDOM},
		&expr.Lookup{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: choice.Name, SetID: choice.ID},
	})
	return balance
}

// dnat rewrites the destination.
func (w *tableWriter) dnat(to netip.AddrPort) []expr.Any {
	nf := uint32(unix.NFPROTO_IPV6)
	if w.is4() {
		nf = unix.NFPROTO_IPV4
	}
	return []expr.Any{
		&expr.Immediate{Register: unix.NFT_REG_1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: unix.NFT_REG_2, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: nf, RegAddrMin: unix.NFT_REG_1, RegProtoMin: unix.NFT_REG_2},
	}
}

// reject answers with "port unreachable", as kube-proxy does.
func (w *tableWriter) reject() []expr.Any {
	code := uint8(icmpv6PortUnreachable)
	if w.is4() {
		code = icmpPortUnreachable
	}
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
}

// matchFrontend matches packets to a Service's address, protocol and port.
func matchFrontend(frontend netip.AddrPort, proto byte) []expr.Any {
	// Where the destination address stands in the header, RFC 791 section 3.1
	// and RFC 8200 section 3.
	offset := uint32(24)
	if frontend.Addr().Is4() {
		offset = 16
	}
	addr := frontend.Addr().AsSlice()
	return []expr.Any{
		&expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(len(addr))},
		equal(addr),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1},
		equal([]byte{proto}),
		// UDP and TCP have the destination port at the same place.
		&expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equal(binary.BigEndian.AppendUint16(nil, frontend.Port())),
	}
}

// stateNew matches packets of flows that begin. Untracked ones are none: kube-proxy
// leaves those to whoever took them (pkg/proxy/iptables, pkg/proxy/nftables).
func stateNew() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: unix.NFT_REG_1},
		&expr.Bitwise{
			SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitNEW), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: unix.NFT_REG_1, Data: make([]byte, 4)},
	}
}

// equal compares register 1.
func equal(data []byte) *expr.Cmp {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: data}
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

// ofFamily picks the addresses of one family.
func ofFamily(addrs []netip.AddrPort, is4 bool) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range addrs {
		if a.Addr().Is4() == is4 {
			out = append(out, a)
		}
	}
	return out
}
