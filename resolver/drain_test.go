package resolver

import (
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// TestDrainOfClosedSocket: a reader that drains ends when its socket is closed
// under it, and does not take its last batch for a new one.
func TestDrainOfClosedSocket(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	u, err := newUDPReader(r, ep.UDP[0])
	if err != nil {
		t.Fatal(err)
	}
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if err := u.raw.Read(u.recvFunc); err != nil {
		t.Fatal(err)
	}
	u.serve()
	if err := ep.UDP[0].Close(); err != nil {
		t.Fatal(err)
	}
	u.drain()
	if n := u.c.queries[UDP].Load(); n != 1 {
		t.Errorf("%d queries served, want the one that came", n)
	}
}
