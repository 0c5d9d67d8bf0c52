package resolver

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"unsafe"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// wire makes a pair of devices in the present namespace, one of them with
// 10.9.0.1/24. Nobody else is there.
func wire() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "here"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "there"}); err != nil {
		return err
	}
	for _, name := range []string{"here", "there"} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if name == "here" {
			addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 9, 0, 1), Mask: net.CIDRMask(24, 32)}}
			if err := netlink.AddrAdd(link, addr); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
	}
	return nil
}

// TestAnswersToNobody: queries from neighbours that do not respond, more than
// the send buffer holds answers for, hold up neither a reader nor a flight. Their
// answers stay in the kernel until it has given up on the neighbours.
func TestAnswersToNobody(t *testing.T) {
	ns := labtest.NewNamespace(t, "resolver")
	if err := ns.Do(wire); err != nil {
		t.Fatal(err)
	}
	pc, err := ns.ListenPacket(t.Context(), "udp4", "10.9.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 3600)})
	u, err := newUDPReader(r, pc.(*net.UDPConn), 1)
	if err != nil {
		t.Fatal(err)
	}
	newClient(t, r, "10.0.0.1", UDP).lookup("example.com.")
	hit, err := query("example.com.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	var refused uint64
	for batch := 0; batch < 2000 && refused == 0; batch++ {
		for i := range u.in.Headers {
			u.in.Headers[i].Len = uint32(copy(u.in.Buffer(i), hit))
			u.in.Headers[i].Namelen = unix.SizeofSockaddrInet4
			*(*unix.RawSockaddrInet4)(unsafe.Pointer(u.in.Peer(i))) = unix.RawSockaddrInet4{
				Family: unix.AF_INET, Port: 0x3930, Addr: [4]byte{10, 9, 0, byte(2 + batch%200)},
			}
		}
		u.received = len(u.in.Headers)
		u.serve()
		refused = u.c.sendErrors.Load()
	}
	if refused == 0 {
		t.Fatal("the send buffer never filled: the test tests nothing")
	}
	// From here on nothing leaves by this socket; that a flight's answer does
	// not wait is that the test ends.
	var flights sync.WaitGroup
	for i := range 10 {
		flights.Go(func() {
			w := &waiter{c: &r.flown, src: source{peer: netip.MustParseAddrPort(fmt.Sprintf("10.9.0.%d:9999", 210+i))}}
			u.owe()
			u.reply(w, hit)
		})
	}
	flights.Wait()
	if n := r.flown.sendErrors.Load(); n == 0 {
		t.Error("no answer of a flight was refused")
	}
}
