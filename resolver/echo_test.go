package resolver

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// TestEchoRules checks what an answer takes from its query and what never
// (DESIGN: the echo rules), for a miss and for the hit that follows.
func TestEchoRules(t *testing.T) {
	edns := func(change func(*dns.OPT)) func(*dns.Msg) {
		return func(m *dns.Msg) {
			m.SetEdns0(4096, false)
			change(m.IsEdns0())
		}
	}
	tests := map[string]struct {
		query func(*dns.Msg)
		raw   func([]byte) []byte
		tcp   bool
		check func(t *testing.T, q, a *dns.Msg)
	}{
		"case, id and RD come back": {
			query: func(m *dns.Msg) { m.Id, m.Question[0].Name = 0xbeef, "eXaMpLe.CoM." },
			check: func(t *testing.T, q, a *dns.Msg) {
				if a.Id != q.Id || a.Question[0] != q.Question[0] || a.Answer[0].Header().Name != "eXaMpLe.CoM." {
					t.Errorf("got %v", a)
				}
				if !a.Response || !a.RecursionDesired || !a.RecursionAvailable {
					t.Errorf("QR, RD or RA is missing: %v", a)
				}
			},
		},
		"RD not set": {
			query: func(m *dns.Msg) { m.RecursionDesired = false },
			check: func(t *testing.T, _, a *dns.Msg) {
				if a.RecursionDesired || !a.RecursionAvailable || len(a.Answer) != 1 {
					t.Errorf("got %v", a)
				}
			},
		},
		"CD comes back, AD does not": {
			query: func(m *dns.Msg) { m.CheckingDisabled, m.AuthenticatedData = true, true },
			check: func(t *testing.T, _, a *dns.Msg) {
				if !a.CheckingDisabled || a.AuthenticatedData {
					t.Errorf("got %v", a)
				}
			},
		},
		"no OPT without OPT": {
			query: func(*dns.Msg) {},
			check: func(t *testing.T, _, a *dns.Msg) {
				if a.IsEdns0() != nil {
					t.Errorf("got %v", a)
				}
			},
		},
		"OPT is ours": {
			query: edns(func(o *dns.OPT) {
				o.SetDo()
				o.Option = append(o.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"},
					&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("x")}, &dns.EDNS0_PADDING{Padding: make([]byte, 16)})
			}),
			check: func(t *testing.T, _, a *dns.Msg) {
				o := a.IsEdns0()
				if o == nil || o.UDPSize() != udpSize || !o.Do() || len(o.Option) != 0 || o.Version() != 0 {
					t.Errorf("got %v", a)
				}
			},
		},
		"keepalive over TCP": {
			tcp: true,
			query: edns(func(o *dns.OPT) {
				o.Option = append(o.Option, &dns.EDNS0_TCP_KEEPALIVE{Code: dns.EDNS0TCPKEEPALIVE})
			}),
			check: func(t *testing.T, _, a *dns.Msg) {
				o := a.IsEdns0()
				if o == nil || len(o.Option) != 1 || o.Option[0].(*dns.EDNS0_TCP_KEEPALIVE).Timeout != 100 {
					t.Errorf("got %v, want a keepalive of 100 x 100 ms", a)
				}
			},
		},
		"no keepalive over UDP": {
			query: edns(func(o *dns.OPT) {
				o.Option = append(o.Option, &dns.EDNS0_TCP_KEEPALIVE{Code: dns.EDNS0TCPKEEPALIVE})
			}),
			check: func(t *testing.T, _, a *dns.Msg) {
				if o := a.IsEdns0(); o == nil || len(o.Option) != 0 {
					t.Errorf("got %v", a)
				}
			},
		},
		"version 1": {
			query: edns(func(o *dns.OPT) { o.SetVersion(1) }),
			check: wantRcode(dns.RcodeBadVers),
		},
		"a cookie of 7 octets": {
			query: edns(func(o *dns.OPT) {
				o.Option = append(o.Option, &dns.EDNS0_LOCAL{Code: dns.EDNS0COOKIE, Data: make([]byte, 7)})
			}),
			check: wantRcode(dns.RcodeFormatError),
		},
		"two OPT records": {
			query: func(m *dns.Msg) { m.SetEdns0(512, false); m.SetEdns0(512, false) },
			check: wantRcode(dns.RcodeFormatError),
		},
		"no question":     {query: func(m *dns.Msg) { m.Question = nil }, check: wantRcode(dns.RcodeFormatError)},
		"two questions":   {query: func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, check: wantRcode(dns.RcodeFormatError)},
		"opcode NOTIFY":   {query: func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }, check: wantRcode(dns.RcodeNotImplemented)},
		"opcode UPDATE":   {query: func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, check: wantRcode(dns.RcodeNotImplemented)},
		"zone transfer":   {query: func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAXFR }, check: wantRcode(dns.RcodeNotImplemented)},
		"class CHAOS":     {query: func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, check: wantRcode(dns.RcodeNotImplemented)},
		"cut in the name": {raw: func(b []byte) []byte { return b[:15] }, query: func(*dns.Msg) {}, check: wantRcode(dns.RcodeFormatError)},
		"ANY": {
			query: func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeANY; m.SetEdns0(1232, true) },
			check: func(t *testing.T, q, a *dns.Msg) {
				if len(a.Answer) != 1 || a.Answer[0].(*dns.HINFO).Cpu != "RFC8482" || a.Answer[0].Header().Name != q.Question[0].Name || a.IsEdns0() == nil {
					t.Errorf("got %v", a)
				}
			},
		},
		"an answer":              {query: func(m *dns.Msg) { m.Response = true }, check: nil},
		"shorter than a header":  {raw: func(b []byte) []byte { return b[:11] }, query: func(*dns.Msg) {}, check: nil},
		"octets after the query": {raw: func(b []byte) []byte { return append(b, "trailing"...) }, query: func(*dns.Msg) {}, check: wantRcode(dns.RcodeSuccess)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: addressOf(t, 60)}
				r := newTestResolver(t, f)
				defer end(t, r)
				transport := UDP
				if tt.tcp {
					transport = TCP
				}
				c := newClient(t, r, "10.0.0.1", transport)
				q := new(dns.Msg)
				q.SetQuestion("example.com.", dns.TypeA)
				tt.query(q)
				b, err := q.Pack()
				if err != nil {
					t.Fatal(err)
				}
				if tt.raw != nil {
					b = tt.raw(b)
				}
				for range 2 {
					waits := c.send(b)
					synctest.Wait()
					if tt.check == nil {
						if waits || len(c.answers) > 0 {
							t.Error("answered, want silence")
						}
						continue
					}
					a := <-c.answers
					if a.Id != q.Id {
						t.Errorf("id %d, want %d", a.Id, q.Id)
					}
					tt.check(t, q, a)
				}
			})
		})
	}
}

func wantRcode(rcode int) func(*testing.T, *dns.Msg, *dns.Msg) {
	return func(t *testing.T, q, a *dns.Msg) {
		if a.Rcode != rcode || a.Opcode != q.Opcode {
			t.Errorf("got %v, want rcode %s", a, dns.RcodeToString[rcode])
		}
	}
}

// TestSizes: what does not fit a client's datagram is cut, with TC, and comes
// whole, compressed, over TCP. What fits of the RRset stays for clients without
// TCP (RFC 2181 section 9), but not for validators.
func TestSizes(t *testing.T) {
	for _, records := range []int{1, 20, 60, 240, 3700} { // 0.05, 0.5, 1.2, 4 and 60 KB
		f := &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
			for i := range records {
				m.Answer = append(m.Answer, rr(t, "%s 60 IN A 10.%d.%d.1", m.Question[0].Name, i/256, i%256))
			}
			return nil
		}}
		for _, client := range []struct {
			size uint16
			do   bool
		}{{0, false}, {512, false}, {1232, false}, {4096, false}, {1232, true}} {
			size, do := client.size, client.do
			for _, transport := range []Transport{UDP, TCP} {
				t.Run(fmt.Sprintf("%d records, size %d, DO %v, %v", records, size, do, transport), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := newTestResolver(t, f)
						defer end(t, r)
						c := newClient(t, r, "10.0.0.1", transport)
						q := new(dns.Msg)
						q.SetQuestion("example.com.", dns.TypeA)
						if size > 0 {
							q.SetEdns0(size, do)
						}
						for range 2 {
							c.ask(q)
							a := <-c.answers
							a.Compress = true
							whole := 12 + 17 + 16*records
							limit := int(max(512, min(size, udpSize)))
							if size > 0 {
								whole += 11
							}
							fits := transport == TCP || whole <= limit
							want := records
							switch {
							case !fits && do:
								want = 0
							case !fits:
								want = records - (whole-limit+15)/16
							}
							if len(a.Answer) != want || a.Truncated == fits {
								t.Errorf("%d records, TC %v, want %d, %v", len(a.Answer), a.Truncated, want, !fits)
							}
							if fits && a.Len() != whole {
								t.Errorf("%d octets, want %d", a.Len(), whole)
							}
						}
					})
				})
			}
		}
	}
}

// FuzzDatagram: whatever comes in costs at most one answer, to the same id and
// question.
func FuzzDatagram(f *testing.F) {
	for _, m := range []*dns.Msg{query("example.com.", dns.TypeA), query("a.b.c.", dns.TypeANY), new(dns.Msg)} {
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, false)
		f.Add(b[:len(b)/2], true)
	}
	r := newTestResolver(f, &fakeForwarder{answer: addressOf(f, 60)})
	f.Cleanup(r.running.Wait)
	f.Fuzz(func(t *testing.T, b []byte, tcp bool) {
		c := newClient(t, r, "10.0.0.1", UDP)
		if tcp {
			c.src.transport = TCP
		}
		if c.send(b) {
			<-c.answers
			return
		}
		select {
		case a := <-c.answers:
			if a.Id != binary.BigEndian.Uint16(b) || !a.Response {
				t.Errorf("query %x: answer %v", b, a)
			}
			if !tcp && a.Len() > udpSize {
				t.Errorf("query %x: %d octets over UDP", b, a.Len())
			}
		default:
			if len(b) >= dnswire.HeaderLen && b[2]&0x80 == 0 {
				t.Errorf("query %x: no answer", b)
			}
		}
	})
}
