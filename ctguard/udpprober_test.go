package ctguard

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"
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
