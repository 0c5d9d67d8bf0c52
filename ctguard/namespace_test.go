package ctguard

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"github.com/ti-mo/netfilter"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// lacking skips a test that this machine's kernel or our rights do not allow,
// or fails it where every test has to run.
func lacking(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("DNSGUARD_REQUIRE_KERNEL") == "1" {
		t.Fatalf("required by DNSGUARD_REQUIRE_KERNEL: "+format, args...)
	}
	t.Skipf(format, args...)
}

// namespace is a network namespace of a test's own. It goes with its thread.
type namespace struct {
	t    testing.TB
	fd   int
	jobs chan func()
}

func newNamespace(t testing.TB) *namespace {
	t.Helper()
	if os.Getuid() != 0 {
		lacking(t, "needs root")
	}
	n := &namespace{t: t, jobs: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends here
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			n.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		ready <- err
		for job := range n.jobs {
			job()
		}
	}()
	if err := <-ready; err != nil {
		close(n.jobs)
		lacking(t, "network namespace: %v", err)
	}
	t.Cleanup(func() {
		close(n.jobs)
		_ = unix.Close(n.fd)
	})
	n.do(func() error {
		lo, err := vnetlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return vnetlink.LinkSetUp(lo)
	})
	return n
}

// do runs fn on a thread within the namespace.
func (n *namespace) do(fn func() error) {
	n.t.Helper()
	done := make(chan error)
	n.jobs <- func() { done <- fn() }
	if err := <-done; err != nil {
		n.t.Fatal(err)
	}
}

// addAddr gives a link an address, without duplicate detection.
func (n *namespace) addAddr(link, addr string) {
	n.t.Helper()
	n.do(func() error {
		l, err := vnetlink.LinkByName(link)
		if err != nil {
			return err
		}
		a, err := vnetlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		return vnetlink.AddrAdd(l, a)
	})
}

// setSysctl writes a file under /proc/sys.
func (n *namespace) setSysctl(name, value string) {
	n.t.Helper()
	n.do(func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0o644) })
}

// kernel opens the namespace's table.
func (n *namespace) kernel() *Kernel {
	n.t.Helper()
	var k *Kernel
	n.do(func() (err error) {
		k, err = OpenKernel(n.fd)
		if errors.Is(err, unix.EPERM) {
			lacking(n.t, "%v", err)
		}
		return err
	})
	n.t.Cleanup(func() { _ = k.Close() })
	return k
}

// listen opens a UDP socket in the namespace.
func (n *namespace) listen(addr string) *net.UDPConn {
	n.t.Helper()
	var c net.PacketConn
	n.do(func() (err error) {
		var lc net.ListenConfig
		c, err = lc.ListenPacket(context.Background(), "udp", addr)
		return err
	})
	n.t.Cleanup(func() { _ = c.Close() })
	return c.(*net.UDPConn)
}

// answer echoes every datagram, with the response bit of a DNS header set, and
// the server's address at the end.
func answer(c *net.UDPConn) {
	buf := make([]byte, 512)
	name := c.LocalAddr().String()
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		if n > 2 {
			buf[2] |= 0x80
		}
		_, _ = c.WriteToUDPAddrPort(append(buf[:n:n], name...), from)
	}
}

// route is one rule of kube-proxy's: what goes to vip is translated to to, or
// not at all if that is not valid.
type route struct{ vip, to netip.AddrPort }

// rules replaces the namespace's translation rules.
func (n *namespace) rules(routes ...route) {
	n.t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(n.fd))
	if err != nil {
		lacking(n.t, "nftables: %v", err)
	}
	table := &nftables.Table{Name: "test", Family: nftables.TableFamilyINet}
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	for name, hook := range map[string]*nftables.ChainHook{
		"pre": nftables.ChainHookPrerouting,
		"out": nftables.ChainHookOutput,
	} {
		chain := c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: hook, Priority: nftables.ChainPriorityNATDest,
		})
		for _, r := range routes {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: r.exprs()})
		}
	}
	if err := c.Flush(); err != nil {
		lacking(n.t, "nftables NAT: %v", err)
	}
}

func (r route) exprs() []expr.Any {
	proto, off, size := byte(unix.NFPROTO_IPV4), uint32(16), uint32(4)
	if r.vip.Addr().Is6() {
		proto, off, size = unix.NFPROTO_IPV6, 24, 16
	}
	es := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: off, Len: size},
		&expr.Cmp{Register: 1, Data: r.vip.Addr().AsSlice()},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Register: 1, Data: binaryutil.BigEndian.PutUint16(r.vip.Port())},
	}
	if !r.to.IsValid() {
		return es
	}
	return append(es,
		&expr.Immediate{Register: 1, Data: r.to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(r.to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(proto), RegAddrMin: 1, RegProtoMin: 2, Specified: true},
	)
}

// zone puts every packet of the namespace into a conntrack zone.
func (n *namespace) zone(id uint16) {
	n.t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(n.fd))
	if err != nil {
		lacking(n.t, "nftables: %v", err)
	}
	table := c.AddTable(&nftables.Table{Name: "zone", Family: nftables.TableFamilyINet})
	for name, hook := range map[string]*nftables.ChainHook{
		"pre": nftables.ChainHookPrerouting,
		"out": nftables.ChainHookOutput,
	} {
		chain := c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: hook, Priority: nftables.ChainPriorityRaw,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint16(nil, id)},
			&expr.Ct{Register: 1, SourceRegister: true, Key: expr.CtKeyZONE},
		}})
	}
	if err := c.Flush(); err != nil {
		lacking(n.t, "nftables zone: %v", err)
	}
}

// fill makes entries, many to a message.
func (n *namespace) fill(flows []Flow) {
	n.t.Helper()
	s, err := openSocket(n.fd)
	if err != nil {
		n.t.Fatal(err)
	}
	defer s.Close()
	buf := make([]byte, datagramSize)
	for start := 0; start < len(flows); start += deleteBatch {
		part := flows[start:min(start+deleteBatch, len(flows))]
		msgs := make([]netlink.Message, len(part))
		for i, f := range part {
			if msgs[i], err = createRequest(f); err != nil {
				n.t.Fatal(err)
			}
			msgs[i].Header.Sequence = uint32(i + 1)
		}
		msgs[len(msgs)-1].Header.Flags |= netlink.Acknowledge
		if err := s.send(msgs); err != nil {
			n.t.Fatal(err)
		}
		for done := false; !done; {
			m, err := s.receive(buf)
			if err != nil {
				n.t.Fatal(err)
			}
			err = messages(buf[:m], func(h netlink.Header, data []byte) error {
				done = done || h.Sequence == uint32(len(msgs))
				if err := errno(data); err != nil {
					return fmt.Errorf("create %v: %w", part[h.Sequence-1], err)
				}
				return nil
			})
			if err != nil {
				n.t.Fatal(err)
			}
		}
	}
}

func createRequest(f Flow) (netlink.Message, error) {
	const (
		confirmed = 1 << 3 // IPS_CONFIRMED
	)
	status := uint32(confirmed)
	if f.SeenReply {
		status |= statusSeenReply
	}
	if f.Assured {
		status |= statusAssured
	}
	attrs := []netfilter.Attribute{
		tuple(ctaTupleOrig, endOf(f.Orig.Src), endOf(f.Orig.Dst), f.Orig.Zone),
		tuple(ctaTupleReply, endOf(f.Reply.Src), endOf(f.Reply.Dst), f.Reply.Zone),
		attr(ctaStatus, netfilter.Uint32Bytes(status)),
		attr(ctaTimeout, netfilter.Uint32Bytes(uint32(f.Remaining/time.Second))),
	}
	if f.Zone != 0 {
		attrs = append(attrs, attr(ctaZone, netfilter.Uint16Bytes(f.Zone)))
	}
	if f.Proto != unix.IPPROTO_UDP {
		// tuple writes UDP as the first child of CTA_TUPLE_PROTO.
		for i := range 2 {
			attrs[i].Children[1].Children[0].Data = []byte{f.Proto}
		}
	}
	const ctNew = 0
	return request(ctNew, familyOf(f.Orig.Src.Addr()), netlink.Create|netlink.Excl, attrs)
}

// flow makes a flow of a client to a frontend, translated to an endpoint.
func flow(client, frontend, endpoint string) Flow {
	c, v, e := netip.MustParseAddrPort(client), netip.MustParseAddrPort(frontend), netip.MustParseAddrPort(endpoint)
	return Flow{
		Proto:     unix.IPPROTO_UDP,
		Orig:      Tuple{Src: c, Dst: v},
		Reply:     Tuple{Src: e, Dst: c},
		Remaining: 100 * time.Second,
		SeenReply: true,
		Assured:   true,
	}
}

// foreign makes n flows that are nothing to the guard: UDP to other ports and
// addresses.
func foreign(n int) []Flow {
	flows := make([]Flow, n)
	for i := range flows {
		s := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), uint16(i>>1)|1024)
		if s.Port() == 53 {
			s = netip.AddrPortFrom(s.Addr(), 54)
		}
		c := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 100, byte(i >> 16), byte(i >> 8)}), uint16(1024+i%60000))
		flows[i] = Flow{
			Proto: unix.IPPROTO_UDP, Orig: Tuple{Src: c, Dst: s}, Reply: Tuple{Src: s, Dst: c},
			Remaining: 600 * time.Second, SeenReply: true, Assured: true,
		}
	}
	return flows
}
