package resolver

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// TestWaiterKeepsItsLocalAddress: on an unspecified address, the answer to a
// question that waited leaves from the address that was asked, whatever the
// reader has received meanwhile.
func TestWaiterKeepsItsLocalAddress(t *testing.T) {
	release := make(chan struct{})
	waiting := make(chan struct{})
	r := newTestResolver(t, &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
		if strings.HasPrefix(m.Question[0].Name, "miss") {
			waiting <- struct{}{}
			<-release
		}
		return addressOf(t, 60)(ctx, m)
	}})
	ep := serve(t, r, "0.0.0.0:0", 1)
	var conns []*dns.Conn
	for i := range 4 {
		// A connected socket: an answer from another address than the one
		// asked does not reach it.
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)}), ep.Addr.Port())
		conn := &dns.Conn{Conn: dial(t, "udp", addr)}
		conns = append(conns, conn)
		if err := conn.WriteMsg(query(fmt.Sprintf("miss%d.example.com.", i), dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		<-waiting // so that each is in the first buffer of its batch
	}
	close(release)
	for i, conn := range conns {
		if _, err := conn.ReadMsg(); err != nil {
			t.Fatalf("asked at 127.0.0.%d: %v", i+1, err)
		}
	}
}
