package mmsg

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// A batch goes out, comes in, and goes back to its sender from the same headers.
func TestRoundTrip(t *testing.T) {
	for _, tt := range []struct {
		name string
		addr netip.Addr
	}{
		{"IPv4", netip.MustParseAddr("127.0.0.1")},
		{"IPv6", netip.MustParseAddr("::1")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server, err := Listen(netip.AddrPortFrom(tt.addr, 0))
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(server)
			client, err := Dial(tt.addr, netip.AddrPortFrom(tt.addr, boundPort(t, server)))
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(client)

			const size = 8
			in, out := NewInbox(4, size), NewInbox(3, size)
			for i := range out.Headers {
				out.Headers[i].Name, out.Headers[i].Namelen = nil, 0 // connected
				out.Reply(i, copy(out.Buffer(i), []byte{'q', byte('0' + i)}))
			}
			if n, errno := Send(client, out.Headers, 0); n != 3 || errno != 0 {
				t.Fatalf("Send = %d, %v", n, errno)
			}
			n, errno := Recv(server, in.Headers, unix.MSG_WAITFORONE)
			if n != 3 || errno != 0 {
				t.Fatalf("Recv = %d, %v", n, errno)
			}
			for i := range n {
				if got, want := string(in.Datagram(i)), "q"+string(rune('0'+i)); got != want {
					t.Errorf("datagram %d = %q, want %q", i, got, want)
				}
				in.Buffer(i)[0] = 'a'
				in.Reply(i, 2)
			}
			if n, errno := Send(server, in.Headers[:n], 0); n != 3 || errno != 0 {
				t.Fatalf("Send back = %d, %v", n, errno)
			}

			back := NewInbox(4, size)
			if n, errno := Recv(client, back.Headers, 0); errno != 0 || n == 0 || string(back.Datagram(0)) != "a0" {
				t.Errorf("Recv back = %d, %v: %q", n, errno, back.Datagram(0))
			}
		})
	}
}

func TestRecvOnEmptyQueue(t *testing.T) {
	fd, err := Listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	in := NewInbox(2, 16)
	if n, errno := Recv(fd, in.Headers, unix.MSG_DONTWAIT); n != 0 || errno != unix.EAGAIN {
		t.Errorf("Recv = %d, %v; want EAGAIN", n, errno)
	}
}

func boundPort(t *testing.T, fd int) uint16 {
	t.Helper()
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return uint16(sa.Port)
	case *unix.SockaddrInet6:
		return uint16(sa.Port)
	default:
		t.Fatalf("socket bound to %T", sa)
		return 0
	}
}
