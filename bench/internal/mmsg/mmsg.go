package mmsg

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// MaxBatch is how many datagrams the callers move per system call. Larger batches
// gained nothing measurable and hold answers back.
const MaxBatch = 64

// Header is the kernel's struct mmsghdr: one datagram of a batch. Len is set by
// the kernel: bytes received or sent.
type Header struct {
	unix.Msghdr
	Len uint32
}

// Recv receives up to len(headers) datagrams and returns how many. With
// MSG_DONTWAIT an empty queue is EAGAIN.
func Recv(fd int, headers []Header, flags int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(headers))), uintptr(len(headers)), uintptr(flags), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Send sends the datagrams of headers and returns how many went out. The kernel
// reports an error only if the first one failed.
func Send(fd int, headers []Header, flags int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(headers))), uintptr(len(headers)), uintptr(flags), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Inbox is a set of receive buffers with their headers.
type Inbox struct {
	Headers []Header
	buffers [][]byte
	iovs    []unix.Iovec
	names   []unix.RawSockaddrInet6
}

// NewInbox makes n buffers of size bytes. Senders' addresses are kept, so that the
// same headers can be sent back.
func NewInbox(n, size int) *Inbox {
	in := &Inbox{
		Headers: make([]Header, n),
		buffers: make([][]byte, n),
		iovs:    make([]unix.Iovec, n),
		names:   make([]unix.RawSockaddrInet6, n),
	}
	backing := make([]byte, n*size)
	for i := range in.Headers {
		in.buffers[i] = backing[i*size : (i+1)*size : (i+1)*size]
		in.iovs[i].Base = unsafe.SliceData(in.buffers[i])
		h := &in.Headers[i]
		h.Iov = &in.iovs[i]
		h.SetIovlen(1)
		h.Name = (*byte)(unsafe.Pointer(&in.names[i]))
		in.Reset(i)
	}
	return in
}

// Reset makes buffer i ready to receive again: the kernel and Reply change lengths.
func (in *Inbox) Reset(i int) {
	in.iovs[i].SetLen(len(in.buffers[i]))
	in.Headers[i].Namelen = unix.SizeofSockaddrInet6
}

// Datagram is what buffer i received.
func (in *Inbox) Datagram(i int) []byte {
	return in.buffers[i][:in.Headers[i].Len]
}

// Buffer is the whole of buffer i.
func (in *Inbox) Buffer(i int) []byte { return in.buffers[i] }

// Reply makes header i send the first n bytes of its buffer to where its datagram
// came from.
func (in *Inbox) Reply(i, n int) { in.iovs[i].SetLen(n) }
