package resolver

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// sizedWorld is a forwarder's answer: www.a.uk has so many addresses of each
// family, www.a one, and nothing else exists.
func sizedWorld(t *testing.T, v4, v6 int) func(context.Context, *dns.Msg) error {
	return func(_ context.Context, m *dns.Msg) error {
		time.Sleep(10 * time.Millisecond)
		q := m.Question[0]
		n := map[uint16]int{dns.TypeA: v4, dns.TypeAAAA: v6}[q.Qtype]
		switch q.Name {
		case "www.a.uk.":
		case "www.a.":
			n = 1
		default:
			m.Rcode = dns.RcodeNameError
		}
		for i := range n {
			data := fmt.Sprintf("A 192.0.2.%d", i+1)
			if q.Qtype == dns.TypeAAAA {
				data = fmt.Sprintf("AAAA 2001:db8::%x", i+1)
			}
			m.Answer = append(m.Answer, rr(t, "%s 300 IN %s", q.Name, data))
		}
		if n == 0 || m.Rcode != dns.RcodeSuccess {
			m.Answer = nil
			m.Ns = []dns.RR{rr(t, ". 30 IN SOA ns.dns. hostmaster. 1 7200 1800 86400 30")}
		}
		return nil
	}
}

// sized is what a client gets to a question without EDNS.
type sized struct {
	rcode   string
	records int
	tc      bool
}

func askSized(t *testing.T, r *Resolver, transport Transport, name string, qtype uint16) sized {
	t.Helper()
	c := newClient(t, r, "10.0.9.9", transport)
	c.ask(new(dns.Msg).SetQuestion(name, qtype))
	m := <-c.answers
	return sized{dns.RcodeToString[m.Rcode], len(m.Answer), m.Truncated}
}

// TestWalkTooLarge: where the CNAME of a finished walk would push the answer over
// its client's size, a client that heeds TC gets all of it over TCP, and one that
// does not is sent on by NXDOMAIN and finds what it would have found alone. So
// does each of the two where one family fits and the other does not. Meanwhile
// no step is taken for the first of another search: www.a.uk.svc.cluster.local
// reads like one for www.a.
func TestWalkTooLarge(t *testing.T) {
	const first = "www.a.uk.shop.svc.cluster.local."
	// The question's 26 octets and 16 an address: 29 fit into 512, and 24 with
	// the CNAME and the longer name.
	for _, tt := range []struct {
		v4, v6      int
		walk4       sized // the first step
		walk6       sized
		last4       sized // the name as it is
		last6       sized
		whole4      int // over TCP
		leavesSteps bool
	}{
		{24, 1, sized{"NOERROR", 25, false}, sized{"NOERROR", 2, false}, sized{"NOERROR", 24, false}, sized{"NOERROR", 1, false}, 25, false},
		{29, 1, sized{"NXDOMAIN", 0, true}, sized{"NOERROR", 2, false}, sized{"NOERROR", 29, false}, sized{"NOERROR", 1, false}, 30, true},
		{30, 0, sized{"NXDOMAIN", 0, true}, sized{"NOERROR", 1, false}, sized{"NOERROR", 30, false}, sized{"NOERROR", 0, false}, 31, true},
		{31, 16, sized{"NXDOMAIN", 0, true}, sized{"NXDOMAIN", 0, true}, sized{"NOERROR", 30, true}, sized{"NOERROR", 16, false}, 32, true},
		{60, 60, sized{"NXDOMAIN", 0, true}, sized{"NXDOMAIN", 0, true}, sized{"NOERROR", 30, true}, sized{"NOERROR", 17, true}, 61, true},
	} {
		t.Run(fmt.Sprintf("%d and %d addresses", tt.v4, tt.v6), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: sizedWorld(t, tt.v4, tt.v6)}
				r := newTestResolver(t, f, withSearch(t))
				defer end(t, r)
				for round := range 3 {
					check := func(transport Transport, name string, want4, want6 sized) {
						t.Helper()
						if got := askSized(t, r, transport, name, dns.TypeA); got != want4 {
							t.Errorf("round %d: %s A over %v: %+v, want %+v", round, name, transport, got, want4)
						}
						if got := askSized(t, r, transport, name, dns.TypeAAAA); got != want6 {
							t.Errorf("round %d: %s AAAA over %v: %+v, want %+v", round, name, transport, got, want6)
						}
					}
					check(UDP, first, tt.walk4, tt.walk6)
					asked := f.total()
					if tt.leavesSteps { // musl
						nowhere := sized{"NXDOMAIN", 0, false}
						check(UDP, "www.a.uk.svc.cluster.local.", nowhere, nowhere)
						check(UDP, "www.a.uk.cluster.local.", nowhere, nowhere)
						check(UDP, "www.a.uk.node.example.", nowhere, nowhere)
					}
					check(UDP, "www.a.uk.", tt.last4, tt.last6)
					check(TCP, first, sized{"NOERROR", tt.whole4, false}, sized{"NOERROR", tt.v6 + 1, false}) // glibc
					if n := f.total() - asked; n != 0 {
						t.Errorf("round %d: %d questions upstream for the steps of a walk that has been made", round, n)
					}
					if round == 1 {
						time.Sleep(time.Minute)
					}
				}
			})
		})
	}
}

// TestWalkTooLargeForAnyone: a winner that fits into 64 KiB by itself, but not with
// the CNAME that leads there, is left to the client.
func TestWalkTooLargeForAnyone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = (65535 - 12 - 10 - 4) / 16
		f := &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
			if m.Question[0].Name != "www.a.uk." {
				m.Rcode = dns.RcodeNameError
				m.Ns = []dns.RR{rr(t, ". 30 IN SOA ns.dns. hostmaster. 1 7200 1800 86400 30")}
				return nil
			}
			for i := range most {
				m.Answer = append(m.Answer, rr(t, "www.a.uk. 300 IN A 10.0.%d.%d", i/256, i%256))
			}
			return nil
		}}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		for _, transport := range []Transport{TCP, UDP} {
			if got, want := askSized(t, r, transport, "www.a.uk.shop.svc.cluster.local.", dns.TypeA), (sized{"NXDOMAIN", 0, false}); got != want {
				t.Errorf("%v: %+v, want %+v", transport, got, want)
			}
		}
		if got, want := askSized(t, r, UDP, "www.a.uk.svc.cluster.local.", dns.TypeA), (sized{"NXDOMAIN", 0, false}); got != want {
			t.Errorf("its second step: %+v, want %+v", got, want)
		}
		if got, want := askSized(t, r, TCP, "www.a.uk.", dns.TypeA), (sized{"NOERROR", most, false}); got != want {
			t.Errorf("its last: %+v, want %+v", got, want)
		}
	})
}

// TestExpandTooLarge: a client that does not walk gets what fits.
func TestExpandTooLarge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
			if m.Question[0].Name != "db.shop.svc.cluster.local." {
				m.Rcode = dns.RcodeNameError
				m.Ns = []dns.RR{rr(t, ". 30 IN SOA ns.dns. hostmaster. 1 7200 1800 86400 30")}
				return nil
			}
			for i := range 60 {
				m.Answer = append(m.Answer, rr(t, "db.shop.svc.cluster.local. 30 IN A 10.0.0.%d", i))
			}
			return nil
		}}
		r := newTestResolver(t, f, withSearch(t, expandShop))
		defer end(t, r)
		// 12 + 8 and a CNAME record of 38; then 16 an address.
		if got, want := askSized(t, r, UDP, "db.", dns.TypeA), (sized{"NOERROR", 1 + (512-12-8-38)/16, true}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got, want := askSized(t, r, TCP, "db.", dns.TypeA), (sized{"NOERROR", 61, false}); got != want {
			t.Errorf("over TCP: %+v, want %+v", got, want)
		}
	})
}
