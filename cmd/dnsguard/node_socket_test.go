package main

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver"
)

// TestSocketsAlike: the sockets of an address that is intercepted have the same
// options as those of a plain one. Both are opened with resolver.ListenOptions;
// here the kernel is asked.
func TestSocketsAlike(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	o := resolver.ListenOptions{Readers: 2, ReceiveBuffer: 1 << 20}
	for _, addr := range []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("[::1]:53")} {
		t.Run(addr.String(), func(t *testing.T) {
			var plain *resolver.Endpoint
			var taken *iptables.Sockets
			err := ns.Do(func() (err error) {
				if plain, err = resolver.Listen(t.Context(), addr, o); err != nil {
					return err
				}
				other := map[bool]string{true: "10.96.0.10:53", false: "[fd00:10:96::a]:53"}[addr.Addr().Is4()]
				taken, err = iptables.Listen(t.Context(), netip.MustParseAddrPort(other), iptables.ListenConfig{UDP: o.Readers, TCP: 1, Net: o.NetConfig()})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer plain.Close()
			defer taken.Close()
			want, got := socketOptions(t, plain.UDP, plain.TCP), socketOptions(t, taken.UDP, taken.TCP)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-plain +transparent):\n%s", diff)
			}
			for _, c := range taken.UDP {
				level, name := unix.SOL_IP, unix.IP_TRANSPARENT
				if addr.Addr().Is6() {
					level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
				}
				if v := getsockopt(t, c, level, name); v != 1 {
					t.Error("not transparent")
				}
			}
			// Ask the kernel for an option that package net or we set: else a
			// comparison of nothing with nothing passes.
			if v := want["udp 0: SO_RCVBUF"]; v != 1<<20 {
				t.Errorf("the receive buffer has %d octets, want %d", v, 1<<20)
			}
			if v := want["tcp 0: SO_PROTOCOL"]; v != unix.IPPROTO_TCP {
				t.Errorf("protocol %d, want plain TCP (%d)", v, unix.IPPROTO_TCP)
			}
		})
	}
}

// socketOptions reads all options that could make a difference to clients.
func socketOptions(t *testing.T, udp []*net.UDPConn, tcp []*net.TCPListener) map[string]int {
	t.Helper()
	out := map[string]int{}
	read := func(name string, c syscall.Conn, is6 bool) {
		for what, o := range map[string][2]int{
			"SO_REUSEPORT": {unix.SOL_SOCKET, unix.SO_REUSEPORT}, "SO_REUSEADDR": {unix.SOL_SOCKET, unix.SO_REUSEADDR},
			"SO_RCVBUF": {unix.SOL_SOCKET, unix.SO_RCVBUF}, "SO_SNDBUF": {unix.SOL_SOCKET, unix.SO_SNDBUF},
			"SO_PROTOCOL": {unix.SOL_SOCKET, unix.SO_PROTOCOL}, "SO_KEEPALIVE": {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
			"SO_BROADCAST": {unix.SOL_SOCKET, unix.SO_BROADCAST}, "SO_MARK": {unix.SOL_SOCKET, unix.SO_MARK},
		} {
			out[name+what] = getsockopt(t, c, o[0], o[1])
		}
		if is6 {
			out[name+"IPV6_V6ONLY"] = getsockopt(t, c, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
			out[name+"IPV6_MTU_DISCOVER"] = getsockopt(t, c, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER)
			out[name+"IPV6_RECVPKTINFO"] = getsockopt(t, c, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
		} else {
			out[name+"IP_MTU_DISCOVER"] = getsockopt(t, c, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER)
			out[name+"IP_PKTINFO"] = getsockopt(t, c, unix.IPPROTO_IP, unix.IP_PKTINFO)
			out[name+"IP_TOS"] = getsockopt(t, c, unix.IPPROTO_IP, unix.IP_TOS)
		}
	}
	is6 := func(a net.Addr) bool { return netip.MustParseAddrPort(a.String()).Addr().Is6() }
	for i, c := range udp {
		read(fmt.Sprintf("udp %d: ", i), c, is6(c.LocalAddr()))
	}
	for i, l := range tcp {
		read(fmt.Sprintf("tcp %d: ", i), l, is6(l.Addr()))
	}
	return out
}

func getsockopt(t *testing.T, c syscall.Conn, level, name int) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var value int
	if cerr := raw.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), level, name) }); cerr != nil || err != nil {
		t.Fatalf("option %d of level %d: %v, %v", name, level, cerr, err)
	}
	return value
}
