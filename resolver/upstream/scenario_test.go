package upstream

import (
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

const ms = time.Millisecond

// on returns a script that does one thing for the first query that the server
// receives, the next for the second, and the last for all others.
func on(scripts ...func(*fakeQuery)) func(*fakeQuery) {
	n := 0
	return func(q *fakeQuery) {
		script := scripts[min(n, len(scripts)-1)]
		n++
		script(q)
	}
}

// byTransport returns a script that differs by transport.
func byTransport(udp, tcp func(*fakeQuery)) func(*fakeQuery) {
	return func(q *fakeQuery) {
		if q.tcp() {
			tcp(q)
		} else {
			udp(q)
		}
	}
}

func answering(rcode int) func(*fakeQuery) {
	return func(q *fakeQuery) { q.reply(0, q.rcode(rcode)) }
}

func cutShort(q *fakeQuery) {
	m := q.rcode(dns.RcodeSuccess)
	m.Truncated = true
	q.reply(0, m)
}

func TestExchange(t *testing.T) {
	type want struct {
		rcode     int
		server    int       // who answered or, of an error, was asked last
		transport Transport // of the answer
		reason    string    // of the error; empty if there is an answer
		after     time.Duration
		queries   []string // "server transport", in order
	}
	tests := map[string]struct {
		servers  []func(*fakeQuery)
		protocol Protocol
		budget   Budget
		name     string
		want     want
	}{
		"one good answer": {
			servers: []func(*fakeQuery){healthy(3 * ms)},
			want:    want{server: 1, after: 3 * ms, queries: []string{"1 udp"}},
		},
		"nxdomain is an answer": {
			servers: []func(*fakeQuery){answering(dns.RcodeNameError), healthy(0)},
			want:    want{rcode: dns.RcodeNameError, server: 1, queries: []string{"1 udp"}},
		},
		"wrong id first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.good()
				m.Id++
				q.reply(1*ms, m)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"wrong name first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.good()
				m.Question[0].Name = "evil.example."
				q.reply(1*ms, m)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"wrong type first: HTTPS and type 97 differ by what is case in names": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.rcode(0)
				m.Question[0].Qtype ^= 0x20
				q.reply(1*ms, m)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"wrong class first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.rcode(0)
				m.Question[0].Qclass = dns.ClassCHAOS
				q.reply(1*ms, m)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"a query comes back first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				q.reply(1*ms, q.Msg)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"garbage first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				whole := pack(q.conn.net.t, q.good())
				q.raw(1*ms, nil)
				q.raw(1*ms, []byte("?"))
				q.raw(1*ms, whole[:len(whole)-1])
				q.raw(1*ms, whole[:12])
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"malformed RDATA that only miekg/dns knows first": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.good()
				m.Answer = append(m.Answer, &dns.RFC3597{
					Hdr:   dns.RR_Header{Name: m.Question[0].Name, Rrtype: dns.TypeNSEC, Class: dns.ClassINET},
					Rdata: "c0ff",
				})
				q.reply(1*ms, m)
				q.reply(5*ms, q.good())
			}},
			want: want{server: 1, after: 5 * ms, queries: []string{"1 udp"}},
		},
		"other case in the question": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.good()
				m.Question[0].Name = strings.ToUpper(m.Question[0].Name)
				q.reply(0, m)
			}},
			want: want{server: 1, queries: []string{"1 udp"}},
		},
		"nothing but garbage": {
			servers: []func(*fakeQuery){func(q *fakeQuery) { q.raw(0, append(pack(q.conn.net.t, q.Msg)[:2], "nonsense, with an id"...)) }},
			want:    want{server: 1, reason: "malformed", after: 1500 * ms, queries: []string{"1 udp"}},
		},
		"truncated": {
			servers: []func(*fakeQuery){byTransport(cutShort, healthy(2*ms))},
			want:    want{server: 1, transport: TCP, after: 2 * ms, queries: []string{"1 udp", "1 tcp"}},
		},
		"truncated in the middle of a record": {
			servers: []func(*fakeQuery){byTransport(func(q *fakeQuery) {
				m := q.good()
				m.Truncated = true
				whole := pack(q.conn.net.t, m)
				q.raw(0, whole[:len(whole)-2])
			}, healthy(2*ms))},
			want: want{server: 1, transport: TCP, after: 2 * ms, queries: []string{"1 udp", "1 tcp"}},
		},
		"truncated, and the hedge is refused": {
			servers: []func(*fakeQuery){byTransport(on(
				func(q *fakeQuery) {
					m := q.rcode(dns.RcodeSuccess)
					m.Truncated = true
					q.reply(300*ms, m)
				},
				func(q *fakeQuery) { q.reply(100*ms, q.rcode(dns.RcodeServerFailure)) },
			), healthy(200*ms))},
			budget: usual,
			want:   want{server: 1, transport: TCP, after: 500 * ms, queries: []string{"1 udp", "1 udp", "1 tcp"}},
		},
		"truncated, no TCP wanted": {
			servers:  []func(*fakeQuery){cutShort},
			protocol: UDPOnly,
			want:     want{server: 1, reason: "truncated", queries: []string{"1 udp"}},
		},
		"truncated, the next server has it whole": {
			servers:  []func(*fakeQuery){byTransport(cutShort, cutShort), healthy(0)},
			protocol: Auto,
			budget:   usual,
			want:     want{server: 2, transport: TCP, queries: []string{"1 udp", "1 tcp", "2 tcp"}},
		},
		"truncated, TCP refused": {
			servers: []func(*fakeQuery){byTransport(cutShort, refusing)},
			want:    want{server: 1, reason: "truncated", queries: []string{"1 udp", "1 tcp", "1 tcp", "1 tcp"}},
		},
		"truncated over TCP": {
			servers:  []func(*fakeQuery){cutShort},
			protocol: TCPOnly,
			want:     want{server: 1, reason: "truncated", queries: []string{"1 tcp"}},
		},
		"TCP only": {
			servers:  []func(*fakeQuery){healthy(4 * ms)},
			protocol: TCPOnly,
			want:     want{server: 1, transport: TCP, after: 4 * ms, queries: []string{"1 tcp"}},
		},
		"TCP answer in single octets": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				msg := pack(q.conn.net.t, q.good())
				q.octets(0, []byte{0})
				q.octets(ms, []byte{byte(len(msg))})
				for i := range msg {
					q.octets(time.Duration(2+i)*ms, msg[i:i+1])
				}
			}},
			protocol: TCPOnly,
			name:     "a.",
			want:     want{server: 1, transport: TCP, after: 48 * ms, queries: []string{"1 tcp"}},
		},
		"TCP closed before the first octet": {
			servers:  []func(*fakeQuery){on(func(q *fakeQuery) { q.refuse(ms, io.EOF) }, healthy(0))},
			protocol: TCPOnly,
			want:     want{server: 1, transport: TCP, after: ms, queries: []string{"1 tcp", "1 tcp"}},
		},
		"TCP closed in the middle of the answer": {
			servers: []func(*fakeQuery){on(func(q *fakeQuery) {
				q.octets(0, []byte{0, 100, 1, 2, 3})
				q.refuse(ms, io.EOF)
			}, healthy(0))},
			protocol: TCPOnly,
			want:     want{server: 1, transport: TCP, after: ms, queries: []string{"1 tcp", "1 tcp"}},
		},
		"TCP always closed": {
			servers:  []func(*fakeQuery){func(q *fakeQuery) { q.refuse(0, io.EOF) }},
			protocol: TCPOnly,
			want:     want{server: 1, reason: "network", queries: []string{"1 tcp", "1 tcp", "1 tcp"}},
		},
		"one lost packet: hedged over a new socket": {
			servers: []func(*fakeQuery){on(blackHole, healthy(ms))},
			budget:  usual,
			want:    want{server: 1, after: 251 * ms, queries: []string{"1 udp", "1 udp"}},
		},
		"two lost packets: the other protocol": {
			servers: []func(*fakeQuery){on(blackHole, blackHole, healthy(ms))},
			budget:  usual,
			want:    want{server: 1, transport: TCP, after: 701 * ms, queries: []string{"1 udp", "1 udp", "1 tcp"}},
		},
		"two lost packets, UDP only: retried over a new socket": {
			servers:  []func(*fakeQuery){on(blackHole, blackHole, healthy(ms))},
			protocol: UDPOnly,
			budget:   usual,
			want:     want{server: 1, after: 701 * ms, queries: []string{"1 udp", "1 udp", "1 udp"}},
		},
		"two servers, the first dead: hedged there, retried at the second": {
			servers: []func(*fakeQuery){blackHole, healthy(ms)},
			budget:  usual,
			want:    want{server: 2, after: 701 * ms, queries: []string{"1 udp", "1 udp", "2 udp"}},
		},
		"all dead": {
			servers: []func(*fakeQuery){blackHole, blackHole},
			budget:  usual,
			want:    want{server: 2, reason: "timeout", after: 1500 * ms, queries: []string{"1 udp", "1 udp", "2 udp"}},
		},
		"dead, and no budget": {
			servers: []func(*fakeQuery){blackHole},
			want:    want{server: 1, reason: "over_budget", after: 1500 * ms, queries: []string{"1 udp"}},
		},
		"slow, and the first answer comes after the retry": {
			servers:  []func(*fakeQuery){healthy(800 * ms)},
			protocol: UDPOnly,
			budget:   usual,
			want:     want{server: 1, after: 800 * ms, queries: []string{"1 udp", "1 udp", "1 udp"}},
		},
		"refused: at once over a new socket": {
			servers: []func(*fakeQuery){on(refusing, healthy(ms))},
			want:    want{server: 1, after: ms, queries: []string{"1 udp", "1 udp"}},
		},
		"refused: at once from the next server": {
			servers: []func(*fakeQuery){refusing, healthy(ms)},
			want:    want{server: 2, after: ms, queries: []string{"1 udp", "2 udp"}},
		},
		"refused by all": {
			servers: []func(*fakeQuery){refusing, refusing},
			want:    want{server: 2, reason: "network", queries: []string{"1 udp", "2 udp", "2 udp"}},
		},
		"servfail, the next server knows": {
			servers: []func(*fakeQuery){answering(dns.RcodeServerFailure), healthy(ms)},
			budget:  usual,
			want:    want{server: 2, after: ms, queries: []string{"1 udp", "2 udp"}},
		},
		"servfail, no budget: the next server's first question is its share": {
			servers: []func(*fakeQuery){answering(dns.RcodeServerFailure), healthy(ms)},
			want:    want{server: 2, after: ms, queries: []string{"1 udp", "2 udp"}},
		},
		"silence, no budget: the next server's first question is its share": {
			servers: []func(*fakeQuery){blackHole, healthy(ms)},
			want:    want{server: 2, after: 701 * ms, queries: []string{"1 udp", "2 udp"}},
		},
		"servfail everywhere: the first is returned": {
			servers: []func(*fakeQuery){answering(dns.RcodeServerFailure), answering(dns.RcodeRefused)},
			budget:  usual,
			want:    want{rcode: dns.RcodeServerFailure, server: 1, queries: []string{"1 udp", "2 udp"}},
		},
		"servfail, the next server is dead": {
			servers:  []func(*fakeQuery){answering(dns.RcodeServerFailure), blackHole},
			protocol: UDPOnly,
			budget:   usual,
			want:     want{rcode: dns.RcodeServerFailure, server: 1, after: 1500 * ms, queries: []string{"1 udp", "2 udp", "2 udp", "2 udp"}},
		},
		"refused answer of the only server": {
			servers: []func(*fakeQuery){answering(dns.RcodeRefused)},
			budget:  usual,
			want:    want{rcode: dns.RcodeRefused, server: 1, queries: []string{"1 udp"}},
		},
		"error without its question gets it back": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.rcode(dns.RcodeRefused)
				m.Question = nil
				q.reply(0, m)
			}},
			want: want{rcode: dns.RcodeRefused, server: 1, queries: []string{"1 udp"}},
		},
		"lame referral": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				m := q.rcode(0)
				m.Ns = []dns.RR{&dns.NS{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeNS, Class: dns.ClassINET, Ttl: 1}, Ns: "a.root-servers.net."}}
				q.reply(0, m)
			}, healthy(ms)},
			budget: usual,
			want:   want{server: 2, after: ms, queries: []string{"1 udp", "2 udp"}},
		},
		"formerr on OPT": {
			servers: []func(*fakeQuery){chokingOn(dns.RcodeFormatError)},
			want:    want{server: 1, queries: []string{"1 udp", "1 udp"}},
		},
		"notimp on OPT": {
			servers: []func(*fakeQuery){chokingOn(dns.RcodeNotImplemented)},
			want:    want{server: 1, queries: []string{"1 udp", "1 udp"}},
		},
		"badvers on OPT": {
			servers: []func(*fakeQuery){chokingOn(dns.RcodeBadVers)},
			want:    want{server: 1, queries: []string{"1 udp", "1 udp"}},
		},
		"formerr with and without OPT": {
			servers: []func(*fakeQuery){answering(dns.RcodeFormatError)},
			want:    want{rcode: dns.RcodeFormatError, server: 1, queries: []string{"1 udp", "1 udp"}},
		},
		"silent on OPT": {
			servers: []func(*fakeQuery){func(q *fakeQuery) {
				if q.IsEdns0() == nil {
					q.reply(ms, q.good())
				}
			}},
			budget: usual,
			want:   want{server: 1, after: 251 * ms, queries: []string{"1 udp", "1 udp"}},
		},
		"UDP blocked": {
			servers: []func(*fakeQuery){byTransport(blackHole, healthy(ms))},
			budget:  usual,
			want:    want{server: 1, transport: TCP, after: 701 * ms, queries: []string{"1 udp", "1 udp", "1 tcp"}},
		},
		"no route": {
			servers: []func(*fakeQuery){healthy(0)},
			name:    "elsewhere.",
			want:    want{reason: "no_servers"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, tt.servers...)
				f := n.forwarder(Config{Budget: tt.budget, Routes: []Route{{Zones: []string{"example", "a"}, Protocol: tt.protocol}}})
				if tt.name == "" {
					tt.name = "www.example."
				}
				q := query(tt.name)
				start := time.Now()
				ans, err := f.Exchange(t.Context(), q)
				got := want{after: time.Since(start)}
				if err != nil {
					var e *Error
					if !errors.As(err, &e) {
						t.Fatalf("error %v is no *Error", err)
					}
					got.reason = e.Reason.String()
					got.server = lastOctet(e.Server)
				} else {
					got.rcode, got.server, got.transport = int(ans.Response.Rcode), lastOctet(ans.Server), ans.Transport
					checkAnswer(t, q, ans)
				}
				for _, q := range n.queries() {
					got.queries = append(got.queries, string(rune('0'+lastOctet(q.conn.server)))+" "+q.conn.network)
				}
				if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(want{})); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// chokingOn returns a script that answers queries with OPT by an error.
func chokingOn(rcode int) func(*fakeQuery) {
	return func(q *fakeQuery) {
		if q.IsEdns0() == nil {
			q.reply(0, q.good())
			return
		}
		m := q.rcode(rcode)
		if rcode > 15 {
			m.SetEdns0(1232, false)
		}
		q.reply(0, m)
	}
}

func lastOctet(a netip.AddrPort) int {
	if !a.IsValid() {
		return 0
	}
	return int(a.Addr().As4()[3])
}

// checkAnswer checks what is promised of every answer.
func checkAnswer(t *testing.T, q Question, ans Answer) {
	t.Helper()
	var r dnswire.Response
	if err := dnswire.ParseResponse(ans.Msg, &r); err != nil {
		t.Fatalf("answer is malformed: %v", err)
	}
	if diff := cmp.Diff(r, ans.Response, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("Response is not that of Msg: %s", diff)
	}
	if r.Flags&dnswire.FlagTC != 0 {
		t.Error("answer has TC")
	}
	got := dnswire.AppendFolded(nil, ans.Msg[dnswire.HeaderLen:dnswire.HeaderLen+r.NameLen])
	if string(got) != string(q.Name) || r.Type != q.Type || r.Class != q.Class {
		t.Errorf("answer to %q %d %d, asked %q %d %d", got, r.Type, r.Class, q.Name, q.Type, q.Class)
	}
	if r.End != len(ans.Msg) {
		t.Errorf("%d octets, message ends at %d", len(ans.Msg), r.End)
	}
}
