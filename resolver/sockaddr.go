package resolver

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// unpinInterface clears the interface index in an IP_PKTINFO or IPV6_PKTINFO
// message, so that the reply takes the route that the routing table gives
// rather than the interface that the query came in by. Link-local IPv6 needs
// the index: there it stays.
func unpinInterface(c []byte) {
	if len(c) < unix.SizeofCmsghdr {
		return
	}
	h := (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
	data := c[unix.CmsgLen(0):]
	switch {
	case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
		(*unix.Inet4Pktinfo)(unsafe.Pointer(&data[0])).Ifindex = 0
	case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
		info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&data[0]))
		if !netip.AddrFrom16(info.Addr).IsLinkLocalUnicast() {
			info.Ifindex = 0
		}
	}
}

// port returns the port of a raw socket address of either family: it stands at the
// same place.
func port(sa *unix.RawSockaddrInet6) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&sa.Port))
	return uint16(b[0])<<8 | uint16(b[1])
}

// sockaddr converts a raw socket address. IPv4-mapped addresses become IPv4.
func sockaddr(sa *unix.RawSockaddrInet6) netip.AddrPort {
	if sa.Family == unix.AF_INET {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(sa))
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), port(sa))
	}
	a := netip.AddrFrom16(sa.Addr).Unmap()
	if sa.Scope_id != 0 && a.Is6() {
		a = a.WithZone(zoneName(sa.Scope_id))
	}
	return netip.AddrPortFrom(a, port(sa))
}

// memInfo reads SO_MEMINFO of a socket; all zero on error.
func memInfo(fd uintptr) (info [unix.SK_MEMINFO_VARS]uint32) {
	size := uint32(unsafe.Sizeof(info))
	_, _, _ = unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	return info
}
