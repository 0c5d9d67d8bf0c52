package mmsg

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Config is what a Batch is made for.
type Config struct {
	Len     int  // datagrams
	Size    int  // of each one's buffer, octets
	Peers   bool // keep the addresses that datagrams come from: not for connected sockets
	Control int  // octets of control messages of each datagram
}

// Batch receives datagrams. With Peers, each can be answered from its own header
// and buffer: the reply goes to the very octets that it came from.
type Batch struct {
	Headers []Header
	iovs    []unix.Iovec
	buffers [][]byte
	peers   []unix.RawSockaddrInet6 // has room for an inet one
	control int
	used    int // headers that were written to since they were set: the first ones
}

// cacheLine is the unit of processors' caches in octets, on amd64 and arm64.
const cacheLine = 64

// NewBatch returns a batch, its buffers from one allocation.
func NewBatch(c Config) *Batch {
	b := &Batch{
		Headers: make([]Header, c.Len),
		iovs:    make([]unix.Iovec, c.Len),
		buffers: make([][]byte, c.Len),
		control: c.Control,
		used:    c.Len,
	}
	if c.Peers {
		b.peers = make([]unix.RawSockaddrInet6, c.Len)
	}
	control := make([]byte, c.Len*c.Control)
	// The buffers begin an odd number of cache lines apart. At a distance of a
	// power of two all of them would fall into a few sets of the processor's
	// first cache (of 4 KiB a way on most), and a batch would not fit into it.
	stride := (c.Size + cacheLine - 1) / cacheLine * cacheLine
	if stride/cacheLine%2 == 0 {
		stride += cacheLine
	}
	buffers := make([]byte, c.Len*stride)
	for i := range b.Headers {
		b.buffers[i] = buffers[i*stride:][:c.Size:c.Size]
		b.iovs[i].Base = unsafe.SliceData(b.buffers[i])
		h := &b.Headers[i]
		h.Iov = &b.iovs[i]
		h.SetIovlen(1)
		if c.Peers {
			h.Name = (*byte)(unsafe.Pointer(&b.peers[i]))
		}
		if c.Control > 0 {
			h.Control = &control[i*c.Control]
		}
	}
	return b
}

// Recv fills the batch from its beginning, as the function Recv does.
func (b *Batch) Recv(fd uintptr, flags int) (int, unix.Errno) {
	// At low rates a batch is one datagram: what was not written to is still as
	// it was set.
	for i := range b.used {
		b.iovs[i].SetLen(len(b.buffers[i]))
		h := &b.Headers[i]
		h.Flags = 0
		if b.peers != nil {
			h.Namelen = unix.SizeofSockaddrInet6
		}
		if b.control > 0 {
			h.SetControllen(b.control)
		}
	}
	n, errno := Recv(fd, b.Headers, flags)
	// The datagram at which the kernel met an error may have been written to in
	// part.
	b.used = min(n+1, len(b.Headers))
	return n, errno
}

// Datagram returns the i-th datagram received, and whether it was longer than its
// buffer.
func (b *Batch) Datagram(i int) (msg []byte, cut bool) {
	h := &b.Headers[i]
	return b.buffers[i][:min(int(h.Len), len(b.buffers[i]))], h.Flags&unix.MSG_TRUNC != 0
}

// Buffer returns the whole of the i-th buffer, which begins with the datagram.
func (b *Batch) Buffer(i int) []byte { return b.buffers[i] }

// Peer returns the address that the i-th datagram came from, of either family.
func (b *Batch) Peer(i int) *unix.RawSockaddrInet6 { return &b.peers[i] }

// Control returns the control messages that came with the i-th datagram.
func (b *Batch) Control(i int) []byte {
	h := &b.Headers[i]
	return unsafe.Slice(h.Control, min(int(h.Controllen), b.control)) //nolint:gosec // not negative
}

// Reply returns the header that sends the first n octets of the i-th buffer to
// where its datagram came from, with the control messages that came with it. It
// holds until the next Recv.
func (b *Batch) Reply(i, n int) Header {
	b.iovs[i].SetLen(n)
	return b.Headers[i]
}
