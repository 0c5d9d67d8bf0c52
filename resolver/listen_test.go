package resolver

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// option reads an option of a socket.
func option(t *testing.T, c syscall.Conn, level, name int) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var value int
	cerr := raw.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), level, name) })
	if cerr != nil || err != nil {
		t.Fatalf("option %d of level %d: %v, %v", name, level, cerr, err)
	}
	return value
}

// TestListenOptions: what the kernel has of the sockets that Listen opens.
func TestListenOptions(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(addr, func(t *testing.T) {
			ep, err := Listen(t.Context(), netip.MustParseAddrPort(addr), ListenOptions{Readers: 2, ReceiveBuffer: 1 << 16})
			if err != nil {
				t.Fatal(err)
			}
			defer ep.Close()
			level, pmtu, omit := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT
			if ep.Addr.Addr().Is6() {
				level, pmtu, omit = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_OMIT
			}
			for _, c := range ep.UDP {
				if got := option(t, c, level, pmtu); got != omit {
					t.Errorf("UDP: path MTU discovery is %d, want OMIT (%d)", got, omit)
				}
				if got := option(t, c, unix.SOL_SOCKET, unix.SO_RCVBUF); got != 1<<16 {
					t.Errorf("UDP: receive buffer of %d octets, want %d", got, 1<<16)
				}
				if got := option(t, c, unix.SOL_SOCKET, unix.SO_REUSEPORT); got != 1 {
					t.Error("UDP: the address is not shared")
				}
			}
			for _, l := range ep.TCP {
				// Multipath TCP is protocol 262.
				if got := option(t, l, unix.SOL_SOCKET, unix.SO_PROTOCOL); got != unix.IPPROTO_TCP {
					t.Errorf("TCP: protocol %d, want plain TCP (%d)", got, unix.IPPROTO_TCP)
				}
				if got := option(t, l, unix.SOL_SOCKET, unix.SO_REUSEPORT); got != 1 {
					t.Error("TCP: the address is not shared")
				}
				dial(t, "tcp", ep.Addr)
				c, err := l.AcceptTCP()
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if r, s := option(t, c, unix.SOL_SOCKET, unix.SO_RCVBUF), option(t, c, unix.SOL_SOCKET, unix.SO_SNDBUF); r != connReceiveBuffer || s != connSendBuffer {
					t.Errorf("TCP: buffers of %d and %d octets, want %d and %d", r, s, connReceiveBuffer, connSendBuffer)
				}
				if got := option(t, c, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT); got != int(connPatience.Milliseconds()) {
					t.Errorf("TCP: the kernel waits for %d ms, want %v", got, connPatience)
				}
			}
		})
	}
}

// transparent opens a socket as interception does, on an address that no
// interface has.
func transparent(t *testing.T, ns *lab.Namespace, addr netip.AddrPort) *net.UDPConn {
	t.Helper()
	lc := ListenOptions{}.NetConfig()
	options := lc.Control
	lc.Control = func(network, address string, c syscall.RawConn) (err error) {
		if err := options(network, address, c); err != nil {
			return err
		}
		cerr := c.Control(func(fd uintptr) {
			level, name := unix.SOL_IP, unix.IP_TRANSPARENT
			if addr.Addr().Is6() {
				level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
			}
			err = unix.SetsockoptInt(int(fd), level, name, 1)
		})
		if cerr != nil {
			return cerr
		}
		return err
	}
	var pc net.PacketConn
	err := ns.Do(func() (err error) {
		pc, err = lc.ListenPacket(t.Context(), "udp", addr.String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pc.Close() })
	return pc.(*net.UDPConn)
}

// TestLeaveGroup: a socket that leaves gets nothing new, keeps what it had, and
// can still answer; whatever its address is, also one that no interface has and
// to which there is no route.
func TestLeaveGroup(t *testing.T) {
	l := labtest.New(t)
	linkLocal := netip.Addr{}
	lonely := labtest.NewNamespace(t, "lonely") // with no interface but lo, and no route
	if l.IPv6 {
		linkLocal = linkLocalOf(t, l.Node.Namespace)
	}
	for name, tt := range map[string]struct {
		ns   *lab.Namespace
		addr netip.Addr
	}{
		"loopback":                        {lonely, netip.MustParseAddr("127.0.0.1")},
		"all addresses":                   {lonely, netip.MustParseAddr("0.0.0.0")},
		"of an interface":                 {l.Node.Namespace, l.Node.IP4},
		"transparent":                     {l.Node.Namespace, netip.MustParseAddr("169.254.20.10")},
		"transparent, no route":           {lonely, netip.MustParseAddr("169.254.20.10")},
		"IPv6, loopback":                  {lonely, netip.MustParseAddr("::1")},
		"IPv6, all addresses":             {lonely, netip.MustParseAddr("::")},
		"IPv6, of an interface":           {l.Node.Namespace, l.Node.IP6},
		"IPv6, transparent":               {l.Node.Namespace, netip.MustParseAddr("fd53:dd:20::10")},
		"IPv6, transparent, no route":     {lonely, netip.MustParseAddr("fd53:dd:20::10")},
		"IPv6, transparent, of the proxy": {lonely, netip.MustParseAddr("fd00:10:96::a")},
		"IPv6, of a link":                 {l.Node.Namespace, linkLocal},
	} {
		t.Run(name, func(t *testing.T) {
			if !tt.addr.IsValid() {
				labtest.Missing(t, fmt.Errorf("no IPv6"))
			}
			leaving := transparent(t, tt.ns, netip.AddrPortFrom(tt.addr, 5353))
			staying := transparent(t, tt.ns, netip.AddrPortFrom(tt.addr, 5353))
			to := netip.AddrPortFrom(tt.addr, 5353)
			if tt.addr.IsUnspecified() {
				to = netip.AddrPortFrom(map[bool]netip.Addr{true: netip.MustParseAddr("127.0.0.1"), false: netip.IPv6Loopback()}[tt.addr.Is4()], 5353)
			}
			if err := leaveGroup(leaving); err != nil {
				t.Fatalf("leave: %v", err)
			}
			if local := leaving.LocalAddr().String(); local != staying.LocalAddr().String() {
				t.Errorf("left as %v, was %v", local, staying.LocalAddr())
			}
			if remote := peerPort(t, leaving); remote != 1 {
				t.Errorf("connected to port %d", remote)
			}
			// Only where something can be sent to the address.
			if !to.Addr().IsLoopback() && tt.addr != l.Node.IP4 && tt.addr != l.Node.IP6 {
				return
			}
			const sent = 32
			for range sent {
				c, err := tt.ns.Dial(t.Context(), "udp", to.String()) // a new port each: half would go to each
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
				_ = c.Close()
			}
			if n := waiting(t, staying); n != sent {
				t.Errorf("%d of %d datagrams came to the one that stays", n, sent)
			}
			if n := waiting(t, leaving); n != 0 {
				t.Errorf("%d of %d datagrams came to the one that left", n, sent)
			}
			client, err := tt.ns.ListenPacket(t.Context(), "udp", netip.AddrPortFrom(to.Addr(), 0).String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			raw, _ := leaving.SyscallConn()
			_ = raw.Control(func(fd uintptr) { // package net does not know that it is connected
				err = unix.Sendto(int(fd), []byte("late"), 0, sockaddrOf(client.LocalAddr().(*net.UDPAddr).AddrPort()))
			})
			if err != nil {
				t.Fatalf("answer after leaving: %v", err)
			}
			if err := client.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := client.ReadFrom(make([]byte, 16)); err != nil {
				t.Errorf("the answer after leaving does not come: %v", err)
			}
		})
	}
}

// linkLocalOf returns an address of the form fe80::...%eth0 in a namespace.
func linkLocalOf(t *testing.T, ns *lab.Namespace) (out netip.Addr) {
	t.Helper()
	err := ns.Do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := ifi.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
				out = p.Addr().WithZone(ifi.Name)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Unmap().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().Unmap().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// peerPort is the port that a socket is connected to.
func peerPort(t *testing.T, c *net.UDPConn) (port int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		switch sa, _ := unix.Getpeername(int(fd)); sa := sa.(type) {
		case *unix.SockaddrInet4:
			port = sa.Port
		case *unix.SockaddrInet6:
			port = sa.Port
		}
	})
	return port
}

// waiting reads what is queued. Over the loopback device it is there once it
// has been sent.
func waiting(t *testing.T, c *net.UDPConn) (n int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		for {
			if _, _, err := unix.Recvfrom(int(fd), make([]byte, 16), unix.MSG_DONTWAIT); err != nil {
				return
			}
			n++
		}
	})
	return n
}
