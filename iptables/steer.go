package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Steer makes the kernel choose only these sockets from now on, among all that
// share the address: a predecessor gets nothing more, even if it hangs and
// cannot step back (SO_ATTACH_REUSEPORT_CBPF, Linux 4.5; TCP 4.6).
// Call it at once after Listen.
//
// The kernel keeps a group's sockets in the order of their binding, and fills
// the place of one that closes with the last. As a predecessor closes its
// sockets one after another, an index that we give may come to lie behind the
// end; the kernel then chooses by hash, and passes over UDP sockets that are
// connected (Linux 5.4). So a process that leaves first connects its sockets to
// a peer that does not exist, then reads them empty, then closes them: nothing
// is lost. If it is killed, what arrives within the microseconds of its exit
// is. Call Settle from time to time until it reports true.
func (s *Sockets) Steer() error {
	for p, conns := range s.raw() {
		program, err := steering(s.first[p], len(conns))
		if err != nil {
			return fmt.Errorf("steer %v %v: %w", p, s.Addr, err)
		}
		if err := attach(conns[0], program); err != nil {
			return fmt.Errorf("steer %v %v: %w", p, s.Addr, err)
		}
	}
	return nil
}

// Settle ends the steering once only these sockets are left, and reports
// whether that is so: the kernel chooses by a hash of addresses and ports
// again, which spreads clients evenly and keeps each with its reader.
// Linux 5.3; before, the steering's choice stays, which is valid but uneven.
func (s *Sockets) Settle() (bool, error) {
	for p, conns := range s.raw() {
		n, err := countGroup(p, s.Addr)
		if err != nil || n > len(conns) {
			return false, err
		}
		cerr := conns[0].Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
		})
		if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.ENOENT) { // too old, or never steered
			err = nil
		}
		if err = errors.Join(cerr, err); err != nil {
			return false, fmt.Errorf("stop steering %v %v: %w", p, s.Addr, err)
		}
	}
	return true, nil
}

// raw returns the sockets of each protocol for system calls.
func (s *Sockets) raw() map[Proto][]syscall.RawConn {
	out := make(map[Proto][]syscall.RawConn)
	for _, c := range s.UDP {
		if raw, err := c.SyscallConn(); err == nil {
			out[UDP] = append(out[UDP], raw)
		}
	}
	for _, l := range s.TCP {
		if raw, err := l.SyscallConn(); err == nil {
			out[TCP] = append(out[TCP], raw)
		}
	}
	return out
}

// steering is the program that chooses one of n sockets from index first on,
// at random: a TCP handshake has no payload to hash, and the packet's own hash
// is often not computed.
func steering(first, n int) ([]bpf.RawInstruction, error) {
	return bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtRand},
		bpf.ALUOpConstant{Op: bpf.ALUOpMod, Val: uint32(n)},
		bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: uint32(first)},
		bpf.RetA{},
	})
}

// attach gives the program to the group of a socket.
func attach(c syscall.RawConn, program []bpf.RawInstruction) error {
	filter := make([]unix.SockFilter, len(program))
	for i, in := range program {
		filter[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	fprog := unix.SockFprog{Len: uint16(len(filter)), Filter: unsafe.SliceData(filter)}
	var err error
	cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &fprog)
	})
	return errors.Join(cerr, err)
}

// Attributes of sock_diag requests, include/uapi/linux/inet_diag.h.
const (
	sockDiagByFamily  = 20
	inetDiagReqV2Size = 56
	allStates         = 0xffffffff
	tcpListenState    = 10 // TCP_LISTEN, include/net/tcp_states.h
)

// countGroup counts the sockets in the kernel's group for an address: those
// that listen, or UDP sockets in any state, since one that has connected keeps
// its place (inet_diag, Linux 3.3).
func countGroup(p Proto, addr netip.AddrPort) (int, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return 0, fmt.Errorf("connect to sock_diag: %w", err)
	}
	defer func() { _ = c.Close() }()
	// struct inet_diag_req_v2
	req := make([]byte, inetDiagReqV2Size)
	req[0] = byte([2]int{unix.AF_INET, unix.AF_INET6}[family(addr.Addr())])
	req[1] = byte(p)
	states := uint32(1 << tcpListenState)
	if p == UDP {
		states = allStates
	}
	binary.NativeEndian.PutUint32(req[4:], states)
	binary.BigEndian.PutUint16(req[8:], addr.Port())
	messages, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump},
		Data:   req,
	})
	if err != nil {
		return 0, fmt.Errorf("list sockets: %w", err)
	}
	n := 0
	for _, m := range messages {
		// struct inet_diag_msg: family, state, timer, retrans, then the
		// socket id: source port, destination port, source address.
		if len(m.Data) < 24 {
			continue
		}
		local, _ := netip.AddrFromSlice(m.Data[8 : 8+addrSize(family(addr.Addr()))])
		if binary.BigEndian.Uint16(m.Data[4:]) == addr.Port() && local == addr.Addr() {
			n++
		}
	}
	return n, nil
}
