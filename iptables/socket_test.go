package iptables

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// TestListenOptions: sockets are transparent, shared and of plain TCP whatever
// the caller's options are, and those are set as well, before binding.
func TestListenOptions(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	for _, addr := range []netip.AddrPort{vip4, vip6} {
		for name, cfg := range map[string]net.ListenConfig{
			"none": {},
			"a buffer and Multipath TCP": func() net.ListenConfig {
				lc := withBuffer(100_000)
				lc.SetMultipathTCP(true)
				return lc
			}(),
		} {
			t.Run(addr.String()+", "+name, func(t *testing.T) {
				var s *Sockets
				in(t, ns, func() (err error) {
					s, err = Listen(t.Context(), addr, ListenConfig{UDP: 2, TCP: 2, Net: cfg})
					return err
				})
				defer s.Close()
				level, transparent := unix.SOL_IP, unix.IP_TRANSPARENT
				if addr.Addr().Is6() {
					level, transparent = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
				}
				conns := s.raw()
				if len(conns[UDP]) != 2 || len(conns[TCP]) != 2 {
					t.Fatalf("%d UDP and %d TCP sockets", len(conns[UDP]), len(conns[TCP]))
				}
				for p, list := range conns {
					for _, c := range list {
						if got := option(t, c, level, transparent); got != 1 {
							t.Errorf("%v: not transparent", p)
						}
						if got := option(t, c, unix.SOL_SOCKET, unix.SO_REUSEPORT); got != 1 {
							t.Errorf("%v: the address is not shared", p)
						}
						if got := option(t, c, unix.SOL_SOCKET, unix.SO_PROTOCOL); got != int(p) {
							t.Errorf("%v: protocol %d", p, got)
						}
						if got := option(t, c, unix.SOL_SOCKET, unix.SO_RCVBUF); (got == 200_000) != (cfg.Control != nil) {
							t.Errorf("%v: receive buffer of %d octets", p, got)
						}
					}
				}
			})
		}
	}
}

func option(t *testing.T, c syscall.RawConn, level, name int) (value int) {
	t.Helper()
	var err error
	if cerr := c.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), level, name) }); cerr != nil || err != nil {
		t.Fatalf("option %d of level %d: %v, %v", name, level, cerr, err)
	}
	return value
}

// withBuffer gives sockets a receive buffer; the kernel doubles it.
func withBuffer(octets int) net.ListenConfig {
	return net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, octets) })
		return errors.Join(cerr, err)
	}}
}
