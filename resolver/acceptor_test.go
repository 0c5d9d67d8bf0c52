package resolver

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestAcceptorEmptiesItsQueue: a connection that the kernel had queued when the
// listener was told to leave is served, however late the acceptor gets to it;
// afterwards the kernel queues no more.
func TestAcceptorEmptiesItsQueue(t *testing.T) {
	const n = 50
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	var conns []*dns.Conn
	for range n {
		conn := &dns.Conn{Conn: dial(t, "tcp", ep.Addr)}
		if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	if err := ep.TCP[0].SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	svc := &service{}
	svc.leaving.Store(true)
	r.accept(svc, ep, &acceptor{l: ep.TCP[0]})
	for i, conn := range conns {
		if m, err := conn.ReadMsg(); err != nil || len(m.Answer) != 1 {
			t.Fatalf("connection %d: %v, %v", i, m, err)
		}
	}
	svc.tcp.Wait()
	var d net.Dialer
	if c, err := d.DialContext(t.Context(), "tcp", ep.Addr.String()); err == nil {
		_ = c.Close()
		t.Error("the listener is still open")
	}
}
