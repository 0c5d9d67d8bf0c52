package ctguard

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestUDPProber(t *testing.T) {
	serve := func(reply func(q []byte) []byte) netip.AddrPort {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			buf := make([]byte, 512)
			for {
				m, from, err := c.ReadFromUDPAddrPort(buf)
				if err != nil {
					return
				}
				if r := reply(buf[:m]); r != nil {
					_, _ = c.WriteToUDPAddrPort(r, from)
				}
			}
		}()
		return c.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	refused := func(q []byte) []byte { q[2] |= 0x80; q[3] |= 5; return q }
	p, err := NewUDPProber("cluster.local.")
	if err != nil {
		t.Fatal(err)
	}
	free, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	closed := free.LocalAddr().(*net.UDPAddr).AddrPort()
	_ = free.Close()
	for _, tt := range []struct {
		name   string
		at     netip.AddrPort
		within time.Duration
		alive  bool
	}{
		{"answers", serve(refused), 5 * time.Second, true},
		{"silent", serve(func([]byte) []byte { return nil }), 50 * time.Millisecond, false},
		{"another id", serve(func(q []byte) []byte { q[0]++; return refused(q) }), 50 * time.Millisecond, false},
		{"echoes the query", serve(func(q []byte) []byte { return q }), 50 * time.Millisecond, false},
		{"rubbish", serve(func([]byte) []byte { return []byte{1} }), 50 * time.Millisecond, false},
		{"nobody listens", closed, 5 * time.Second, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tt.within)
			defer cancel()
			err := p.Probe(ctx, tt.at)
			if (err == nil) != tt.alive {
				t.Errorf("Probe: %v", err)
			}
		})
	}
	for _, name := range []string{"a..b", ".", string(make([]byte, 64)), string(make([]byte, 300))} {
		if _, err := NewUDPProber(name); (err == nil) != (name == ".") {
			t.Errorf("NewUDPProber(%q): %v", name, err)
		}
	}
}

// TestUDPProberLate: an answer that came in time counts, although nobody looked
// before the time was over.
func TestUDPProberLate(t *testing.T) {
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	conn, err := net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, tt := range []struct {
		name  string
		sent  [][]byte
		alive bool
	}{
		{"answer", [][]byte{{0, 7, 0x80, 11: 0}}, true},
		{"another, then the answer", [][]byte{{0, 8, 0x80, 11: 0}, {0, 7, 0x80, 11: 0}}, true},
		{"another", [][]byte{{0, 8, 0x80, 11: 0}}, false},
		{"nothing", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, b := range tt.sent { // over loopback, they have arrived when this returns
				if _, err := server.WriteTo(b, conn.LocalAddr()); err != nil {
					t.Fatal(err)
				}
			}
			if err := conn.SetDeadline(time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
			if err := awaitAnswer(conn, 7); (err == nil) != tt.alive {
				t.Errorf("awaitAnswer: %v", err)
			}
		})
	}
}

// TestUDPProberCannot: what keeps a probe on this machine tells nothing of the
// endpoint.
func TestUDPProberCannot(t *testing.T) {
	p, err := NewUDPProber(".")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Probe(ctx, netip.MustParseAddrPort("127.0.0.1:9")); !errors.Is(err, ErrNotSent) {
		t.Errorf("Probe after its time: %v", err)
	}
	for _, tt := range []struct {
		err  error
		sent bool
	}{
		{unix.EMFILE, false},
		{unix.EPERM, false},
		{unix.ENOBUFS, false},
		{os.ErrDeadlineExceeded, false},
		{unix.ECONNREFUSED, true},
		{unix.EHOSTUNREACH, true},
		{unix.ENETUNREACH, true},
	} {
		err := unsent(&net.OpError{Op: "write", Err: os.NewSyscallError("sendto", tt.err)})
		if errors.Is(err, ErrNotSent) == tt.sent || !errors.Is(err, tt.err) {
			t.Errorf("%v becomes %v", tt.err, err)
		}
	}
}
