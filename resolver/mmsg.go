package resolver

import (
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Sizes of a batch. Each reader owns one batch of each direction: 64 x (2 KiB
// in + 1.3 KiB out), about 220 KiB, and less where there are many readers.
const (
	// batchLen bounds how long one RawSyscall keeps its P: receiving 64
	// small datagrams takes the kernel about 60 us.
	batchLen = 64
	// batchTotal is how many datagrams the batches of an address's readers hold
	// together, but each at least leastBatch.
	batchTotal = 8 * batchLen
	leastBatch = 8
	// datagramLen is the largest query taken in over UDP. Queries are far
	// below 512 octets but for EDNS padding (RFC 8467: up to 128 octets'
	// steps); a longer one is answered FORMERR.
	datagramLen = 2048
	// controlLen holds one IP_PKTINFO or IPV6_PKTINFO message.
	controlLen = 64
)

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [unsafe.Sizeof(uintptr(0)) - 4]byte
}

// batch holds up to batchLen datagrams with their peers, in the form of
// recvmmsg(2) and sendmmsg(2). The peers' addresses stay raw: a reply goes to
// the very octets that its query came from.
type batch struct {
	hdrs    [batchLen]mmsghdr
	iovs    [batchLen]unix.Iovec
	names   [batchLen]unix.RawSockaddrInet6 // has room for an inet one
	control [batchLen][controlLen]byte
	bufs    [batchLen][]byte // the first length of them
	length  int
	used    int // headers that recvmmsg has written to, or all at first
}

// newBatch returns a batch of length buffers of size octets each, from one
// allocation.
func newBatch(length, size int) *batch {
	b := &batch{length: length, used: length}
	mem := make([]byte, length*size)
	for i := range length {
		b.bufs[i] = mem[i*size : (i+1)*size : (i+1)*size]
		b.iovs[i].Base = &b.bufs[i][0]
		b.hdrs[i].hdr.Iov = &b.iovs[i]
		b.hdrs[i].hdr.SetIovlen(1)
		b.hdrs[i].hdr.Name = (*byte)(unsafe.Pointer(&b.names[i]))
	}
	return b
}

// recv fills the batch without waiting. It uses RawSyscall: the call never
// blocks, and Syscall would hand the P to another thread and wake sysmon,
// which at low rates costs more than the DNS work (measured: half).
func (b *batch) recv(fd uintptr, withControl bool) (int, syscall.Errno) {
	// At low rates a batch is one datagram: what the last one did not touch is
	// still as it was set.
	for i := range b.used {
		h := &b.hdrs[i].hdr
		b.iovs[i].SetLen(len(b.bufs[i]))
		h.Namelen = unix.SizeofSockaddrInet6
		h.Flags = 0
		if withControl {
			h.Control = &b.control[i][0]
			h.SetControllen(controlLen)
		}
	}
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&b.hdrs[0])),
			uintptr(b.length), unix.MSG_DONTWAIT, 0, 0) //nolint:gosec // not negative
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			n = 0
		}
		// The datagram at which recvmmsg met an error may have been written to
		// in part.
		b.used = min(int(n)+1, b.length)
		return int(n), errno
	}
}

// datagram returns the i-th datagram received, and whether it was longer than
// the buffer.
func (b *batch) datagram(i int) (msg []byte, cut bool) {
	return b.bufs[i][:min(int(b.hdrs[i].len), len(b.bufs[i]))], b.hdrs[i].hdr.Flags&unix.MSG_TRUNC != 0
}

// nativeUint32 reads four octets as the machine holds them in a register.
func nativeUint32(b [4]byte) uint32 { return *(*uint32)(unsafe.Pointer(&b)) }

// peer returns the address that the i-th datagram came from.
func (b *batch) peer(i int) netip.AddrPort { return sockaddr(&b.names[i]) }

// local returns the octets of the control message that names the local address
// of the i-th datagram, in the form in which they go with a reply; nil without
// one.
func (b *batch) local(i int) []byte {
	h := &b.hdrs[i].hdr
	if h.Control == nil || h.Controllen == 0 {
		return nil
	}
	c := b.control[i][:min(int(h.Controllen), controlLen)]
	unpinInterface(c)
	return c
}

// reply makes message out of b the answer to datagram in of from.
func (b *batch) reply(out, length int, from *batch, in int) {
	b.names[out] = from.names[in]
	h := &b.hdrs[out].hdr
	h.Namelen = from.hdrs[in].hdr.Namelen
	b.iovs[out].SetLen(length)
	h.Control = nil
	h.SetControllen(0)
	if c := from.local(in); c != nil {
		h.Control = &b.control[out][0]
		h.SetControllen(copy(b.control[out][:], c))
	}
}

// send sends messages [from, to) without waiting and returns how many went.
func (b *batch) send(fd uintptr, from, to int) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.hdrs[from])),
			uintptr(to-from), unix.MSG_DONTWAIT, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

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

// sockaddr converts a raw socket address. IPv4-mapped addresses become IPv4.
func sockaddr(sa *unix.RawSockaddrInet6) netip.AddrPort {
	port := func(p *uint16) uint16 {
		b := (*[2]byte)(unsafe.Pointer(p))
		return uint16(b[0])<<8 | uint16(b[1])
	}
	if sa.Family == unix.AF_INET {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(sa))
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), port(&in.Port))
	}
	a := netip.AddrFrom16(sa.Addr).Unmap()
	if sa.Scope_id != 0 && a.Is6() {
		a = a.WithZone(zoneName(sa.Scope_id))
	}
	return netip.AddrPortFrom(a, port(&sa.Port))
}

// memInfo reads SO_MEMINFO of a socket; all zero on error.
func memInfo(fd uintptr) (info [unix.SK_MEMINFO_VARS]uint32) {
	size := uint32(unsafe.Sizeof(info))
	_, _, _ = unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	return info
}
