package resolver

import (
	"bytes"
	"context"
	"net/netip"
	"testing"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// TestAnswersInPlace: answers without records are the same where they are written
// over their queries, whatever the queries have behind the question. (Of answers
// with records FuzzHitEqualsMiss says so.)
func TestAnswersInPlace(t *testing.T) {
	queries := map[string][]byte{"no question": {0, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}}
	pack := func(name string, m *dns.Msg, tail ...byte) {
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		queries[name] = append(b, tail...)
	}
	pack("ANY", query("example.com.", dns.TypeANY))
	pack("ANY, no EDNS", new(dns.Msg).SetQuestion("example.com.", dns.TypeANY), []byte("what nobody asked for")...)
	pack("AXFR", query("example.com.", dns.TypeAXFR))
	pack("failure", query("fails.example.com.", dns.TypeA))
	padded := query("example.com.", dns.TypeAXFR)
	padded.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: bytes.Repeat([]byte("x"), 300)}}
	pack("padded", padded)
	version := query("example.com.", dns.TypeA)
	version.IsEdns0().SetVersion(1)
	pack("BADVERS", version)
	notify := query("example.com.", dns.TypeSOA)
	notify.Opcode = dns.OpcodeNotify
	pack("NOTIMP", notify)
	two := query("example.com.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	pack("FORMERR", two)

	r := newTestResolver(t, &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
		m.Rcode = dns.RcodeRefused
		return nil
	}})
	newClient(t, r, "10.0.0.1", UDP).lookup("fails.example.com.")
	c := &rawClient{s: newScratch(new(counters)), answers: make(chan []byte, 1)}
	c.replier = c
	for name, q := range queries {
		want, got := c.ask(r, q), c.askInPlace(r, q)
		if len(want) == 0 || !bytes.Equal(got, want) {
			t.Errorf("%s: %x in place, else %x", name, got, want)
		}
	}
}

// TestReceivedCountsEveryClient: in whatever order clients are heard of, and in
// batches of however many.
func TestReceivedCountsEveryClient(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 3600)})
	u, ep := idleReader(t, r)
	u.sendFunc = func(uintptr) {}
	r.serving[ep] = &service{readers: []*udpReader{u}}
	t.Cleanup(func() { delete(r.serving, ep) })
	clients := []netip.Addr{
		netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("::ffff:10.0.0.2"),
		netip.MustParseAddr("fd00::1"), netip.MustParseAddr("::a00:1"), netip.MustParseAddr("fd00::2"),
	}
	want := map[netip.Addr]uint64{}
	n := 0
	for batch := 1; batch <= len(u.in.Headers); batch++ {
		for i := range batch {
			client := clients[n/(1+batch%3)%len(clients)] // one, two or three times in a row
			n++
			want[client.Unmap()]++
			if client.Is4() {
				*(*unix.RawSockaddrInet4)(unsafe.Pointer(u.in.Peer(i))) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: 7, Addr: client.As4()}
			} else {
				*u.in.Peer(i) = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: 7, Addr: client.As16()}
			}
			u.in.Headers[i].Len = 1 // heard, and not worth an answer
		}
		u.received = batch
		u.serve()
	}
	for client, n := range want {
		if got := r.Received(client, UDP); got != n {
			t.Errorf("%v was heard %d times, want %d", client, got, n)
		}
	}
	if got := u.c.dropped.Load(); got != uint64(n) {
		t.Errorf("%d datagrams dropped, want %d", got, n)
	}
}
