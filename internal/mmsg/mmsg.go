package mmsg

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Header is struct mmsghdr: one datagram of a batch. Len is set by the kernel: the
// octets received or sent.
type Header struct {
	unix.Msghdr
	Len uint32
}

// Recv receives up to len(headers) datagrams, at least one, and returns how many.
// With MSG_DONTWAIT an empty queue is EAGAIN. The kernel changes each header's
// lengths and flags.
func Recv(fd uintptr, headers []Header, flags int) (int, unix.Errno) {
	return call(unix.SYS_RECVMMSG, fd, headers, flags)
}

// Send sends the datagrams of at least one header and returns how many went out.
// The kernel reports an error only if the first one failed.
func Send(fd uintptr, headers []Header, flags int) (int, unix.Errno) {
	return call(unix.SYS_SENDMMSG, fd, headers, flags)
}

func call(trap, fd uintptr, headers []Header, flags int) (int, unix.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(headers))),
			uintptr(len(headers)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
