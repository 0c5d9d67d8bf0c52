package ctguard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// datagramSize is the room for one datagram of a dump of the whole table. The
// kernel fits its datagrams to the reader's buffer, up to 32 KiB, so that more would
// not save system calls and less would cost them.
const datagramSize = 64 << 10

// filteredSize is the same for a dump by a filter, of which a few entries are
// expected. Until a datagram is full the kernel walks on with softirqs disabled, so
// that neither packets nor other threads have that CPU. With small datagrams it comes
// up for air more often (design note 0008). Its least is 8 KiB on large pages.
const filteredSize = 8 << 10

// answerSize is the room for a datagram of any other kind: one event, or one
// answer with a copy of the request, of a few hundred bytes.
const answerSize = 8 << 10

// transport is a netlink socket of one operation: requests go in, datagrams
// come out. Nothing of one operation can therefore be left over for the next,
// and one that has to be given up is ended by closing its socket.
type transport interface {
	send(msgs []netlink.Message) error
	// receive waits for a datagram from the kernel.
	receive(buf []byte) (int, error)
	Close() error
}

// socket is the transport to the kernel.
//
// It reads by itself, since mdlayher/netlink swallows the message that ends a
// dump, which is where the kernel says that the dump was interrupted, and
// copies each datagram twice.
type socket struct {
	conn   *netlink.Conn
	raw    syscall.RawConn
	closed atomic.Bool
}

// openSocket opens a socket in the namespace ns, a file descriptor, or in that
// of the calling thread if ns is 0.
func openSocket(ns int) (*socket, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: ns})
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netfilter socket: %w", err), conn.Close())
	}
	return &socket{conn: conn, raw: raw}, nil
}

func (s *socket) send(msgs []netlink.Message) error {
	_, err := s.conn.SendMessages(msgs)
	return err
}

func (s *socket) receive(buf []byte) (n int, err error) {
	rerr := s.raw.Read(func(fd uintptr) bool {
		for {
			var from unix.Sockaddr
			n, from, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err == nil {
				if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
					continue // some process's, not the kernel's
				}
			}
			return !errors.Is(err, unix.EAGAIN)
		}
	})
	switch {
	case rerr != nil && s.closed.Load():
		// The file's own error is known to nobody but package poll.
		return 0, net.ErrClosed
	case rerr != nil:
		return 0, rerr
	case err != nil:
		return 0, os.NewSyscallError("recvfrom", err)
	case n > len(buf):
		return 0, fmt.Errorf("datagram of %d bytes: %w", n, unix.EMSGSIZE)
	}
	return n, nil
}

func (s *socket) Close() error {
	s.closed.Store(true)
	return s.conn.Close()
}

// messages walks through a datagram.
func messages(b []byte, fn func(h netlink.Header, data []byte) error) error {
	for len(b) >= unix.NLMSG_HDRLEN {
		h := netlink.Header{
			Length:   binary.NativeEndian.Uint32(b),
			Type:     netlink.HeaderType(binary.NativeEndian.Uint16(b[4:])),
			Flags:    netlink.HeaderFlags(binary.NativeEndian.Uint16(b[6:])),
			Sequence: binary.NativeEndian.Uint32(b[8:]),
			PID:      binary.NativeEndian.Uint32(b[12:]),
		}
		if h.Length < unix.NLMSG_HDRLEN || uint64(h.Length) > uint64(len(b)) {
			return fmt.Errorf("netlink message of %d bytes in %d: %w", h.Length, len(b), unix.EBADMSG)
		}
		if err := fn(h, b[unix.NLMSG_HDRLEN:h.Length]); err != nil {
			return err
		}
		aligned := (int(h.Length) + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		b = b[min(aligned, len(b)):]
	}
	return nil
}

// errno reads the error number with which the kernel ends an operation: nil
// is success. Both an error message and the end of a dump begin with it.
func errno(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	if n := int32(binary.NativeEndian.Uint32(data)); n != 0 {
		return unix.Errno(-n)
	}
	return nil
}
