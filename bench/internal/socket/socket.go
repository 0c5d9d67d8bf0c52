package socket

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// socketBuffer holds a full burst of the largest window; the default of 208 KiB
// overflowed at 240 outstanding queries.
const socketBuffer = 8 << 20

// Listen opens a blocking UDP socket bound to addr. The caller owns it.
func Listen(addr netip.AddrPort) (fd int, err error) {
	fd, err = socket(addr.Addr())
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, sockaddr(addr)); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("bind %v: %w", addr, err)
	}
	return fd, nil
}

// Dial opens a UDP socket connected to server, from a port that the kernel picks,
// and from the address local if that is valid. The caller owns it.
func Dial(local netip.Addr, server netip.AddrPort) (fd int, err error) {
	fd, err = socket(server.Addr())
	if err != nil {
		return -1, err
	}
	if local.IsValid() {
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(local, 0))); err != nil {
			_ = unix.Close(fd)
			return -1, fmt.Errorf("bind %v: %w", local, err)
		}
	}
	if err := unix.Connect(fd, sockaddr(server)); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("connect to %v: %w", server, err)
	}
	return fd, nil
}

func socket(addr netip.Addr) (int, error) {
	family := unix.AF_INET
	if addr.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open UDP socket: %w", err)
	}
	for _, opt := range []struct{ force, plain int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF},
		{unix.SO_SNDBUFFORCE, unix.SO_SNDBUF},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt.force, socketBuffer) == nil {
			continue
		}
		// Without CAP_NET_ADMIN the kernel grants what net.core.*mem_max allows.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt.plain, socketBuffer); err != nil {
			_ = unix.Close(fd)
			return -1, fmt.Errorf("set socket buffer to %d bytes: %w", socketBuffer, err)
		}
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}
