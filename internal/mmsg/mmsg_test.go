package mmsg

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// open returns the descriptor of a socket of package net, which lives as long as
// the test.
func open(t *testing.T, c syscall.Conn) uintptr {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var fd uintptr
	if err := raw.Control(func(f uintptr) { fd = f }); err != nil {
		t.Fatal(err)
	}
	return fd
}

// pair returns a socket on addr and one that is connected to it.
func pair(t *testing.T, addr netip.Addr) (server, client uintptr) {
	t.Helper()
	s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c, err := net.DialUDP("udp", nil, s.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return open(t, s), open(t, c)
}

func send(t *testing.T, fd uintptr, datagrams ...[]byte) {
	t.Helper()
	headers := make([]Header, len(datagrams))
	for i, d := range datagrams {
		iov := unix.Iovec{Base: unsafe.SliceData(d)}
		iov.SetLen(len(d))
		headers[i].Iov = &iov
		headers[i].SetIovlen(1)
	}
	if n, errno := Send(fd, headers, 0); n != len(headers) || errno != 0 {
		t.Fatalf("Send = %d, %v; want %d", n, errno, len(headers))
	}
}

func recv(t *testing.T, b *Batch, fd uintptr, want ...string) {
	t.Helper()
	n, errno := b.Recv(fd, unix.MSG_DONTWAIT)
	if n != len(want) || errno != 0 {
		t.Fatalf("Recv = %d, %v; want %d", n, errno, len(want))
	}
	for i, w := range want {
		if msg, cut := b.Datagram(i); string(msg) != w || cut {
			t.Errorf("datagram %d = %q, cut %v; want %q", i, msg, cut, w)
		}
	}
}

// A batch comes in, and some of it goes back to where it came from, in the
// buffers that it came in; then the same batch takes the next ones.
func TestReplies(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		for _, control := range []int{0, 64} {
			t.Run(fmt.Sprintf("%s,control=%d", addr, control), func(t *testing.T) {
				server, client := pair(t, netip.MustParseAddr(addr))
				in := NewBatch(Config{Len: 4, Size: 8, Peers: true, Control: control})
				back := NewBatch(Config{Len: 4, Size: 8})
				for round := range 3 {
					send(t, client, []byte("q0"), []byte("q1"), []byte("question"))
					recv(t, in, server, "q0", "q1", "question")
					var out []Header
					for _, i := range []int{0, 2} { // one deserves no answer
						in.Buffer(i)[0] = 'a'
						out = append(out, in.Reply(i, 2+round))
					}
					if n, errno := Send(server, out, 0); n != 2 || errno != 0 {
						t.Fatalf("Send = %d, %v; want 2", n, errno)
					}
					recv(t, back, client, "a0\x00\x00"[:2+round], "aues"[:2+round])
				}
			})
		}
	}
}

func TestLocalAddress(t *testing.T) {
	server, client := pair(t, netip.MustParseAddr("127.0.0.1"))
	if err := unix.SetsockoptInt(int(server), unix.IPPROTO_IP, unix.IP_PKTINFO, 1); err != nil {
		t.Fatal(err)
	}
	in := NewBatch(Config{Len: 2, Size: 8, Control: 64})
	for range 2 {
		send(t, client, []byte("q"))
		recv(t, in, server, "q")
		messages, err := unix.ParseSocketControlMessage(in.Control(0))
		if err != nil || len(messages) != 1 || messages[0].Header.Type != unix.IP_PKTINFO ||
			!bytes.Equal(messages[0].Data[8:12], []byte{127, 0, 0, 1}) {
			t.Errorf("control messages %v, %v; want one IP_PKTINFO of 127.0.0.1", messages, err)
		}
	}
}

func TestCutDatagram(t *testing.T) {
	server, client := pair(t, netip.MustParseAddr("127.0.0.1"))
	in := NewBatch(Config{Len: 2, Size: 4})
	send(t, client, []byte("12345"), []byte("1234"))
	if n, errno := in.Recv(server, unix.MSG_DONTWAIT); n != 2 || errno != 0 {
		t.Fatalf("Recv = %d, %v", n, errno)
	}
	for i, want := range []bool{true, false} {
		if msg, cut := in.Datagram(i); string(msg) != "1234" || cut != want {
			t.Errorf("datagram %d = %q, cut %v; want cut %v", i, msg, cut, want)
		}
	}
}

func TestEmptyQueue(t *testing.T) {
	server, _ := pair(t, netip.MustParseAddr("127.0.0.1"))
	in := NewBatch(Config{Len: 2, Size: 16})
	if n, errno := in.Recv(server, unix.MSG_DONTWAIT); n != 0 || errno != unix.EAGAIN {
		t.Errorf("Recv = %d, %v; want EAGAIN", n, errno)
	}
}

// The buffers of a batch do not compete for a few sets of the processor's cache.
func TestBuffersSpread(t *testing.T) {
	const way = 4096 // octets, on most
	for _, size := range []int{1232, 2048, 4096} {
		b := NewBatch(Config{Len: way / cacheLine, Size: size})
		sets := map[uintptr]bool{}
		for i := range b.buffers {
			sets[uintptr(unsafe.Pointer(&b.buffers[i][0]))%way/cacheLine] = true
		}
		if len(sets) != len(b.buffers) {
			t.Errorf("buffers of %d octets begin in %d sets, want %d", size, len(sets), len(b.buffers))
		}
	}
}

func TestReplyAllocatesNothing(t *testing.T) {
	server, client := pair(t, netip.MustParseAddr("127.0.0.1"))
	in, back := NewBatch(Config{Len: 2, Size: 8, Peers: true}), NewBatch(Config{Len: 2, Size: 8})
	out := make([]Header, 0, 2)
	send(t, client, []byte("x"))
	if n := testing.AllocsPerRun(100, func() {
		_, errno := in.Recv(server, unix.MSG_DONTWAIT)
		out = append(out[:0], in.Reply(0, 1))
		_, errno2 := Send(server, out, 0)
		_, errno3 := back.Recv(client, unix.MSG_DONTWAIT)
		_, errno4 := Send(client, back.Headers[:1], 0)
		if errno != 0 || errno2 != 0 || errno3 != 0 || errno4 != 0 {
			t.Fatal(errno, errno2, errno3, errno4)
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}
