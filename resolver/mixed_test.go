package resolver

import (
	"bytes"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// mixedAddr is the address of a name in TestMixedBatches: an answer to another
// question would have another one.
func mixedAddr(name string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(dns.CanonicalName(name)))
	s := h.Sum32()
	return fmt.Sprintf("10.%d.%d.%d", byte(s>>16), byte(s>>8), byte(s))
}

// mixedUpstream answers some names at once and some late, with much and with
// little, and some not at all.
func mixedUpstream(t testing.TB) *fakeForwarder {
	return &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
		q := m.Question[0]
		name := dns.CanonicalName(q.Name)
		switch name[0] {
		case 's':
			time.Sleep(time.Duration(len(name)%5) * time.Millisecond)
		case 'f':
			m.Rcode = dns.RcodeRefused
			return nil
		case 'x':
			m.Rcode = dns.RcodeNameError
			m.Ns = []dns.RR{rr(t, "example. 60 IN SOA ns.example. h.example. 1 2 3 4 5")}
			return nil
		}
		n := 1
		if name[0] == 'l' { // more than fits
			n = 100
		}
		for i := range n {
			m.Answer = append(m.Answer, rr(t, "%s 60 IN A %s", q.Name, mixedAddr(fmt.Sprintf("%s%.*s", name, i, bytes.Repeat([]byte("+"), i)))))
		}
		return nil
	}}
}

// mixedQuery returns a query with the id, of which much is left to chance, and
// whether it deserves an answer.
func mixedQuery(t testing.TB, dice *rand.Rand, id uint16) (wire []byte, answered bool) {
	kinds := []string{"h", "h", "h", "s", "f", "x", "l", "m"}
	kind := kinds[dice.IntN(len(kinds))]
	name := fmt.Sprintf("%s%d.", kind, dice.IntN(20))
	if kind == "m" || kind == "s" { // hardly asked twice
		name = fmt.Sprintf("%s%d.", kind, dice.IntN(1<<30))
	}
	for range dice.IntN(3) {
		name += string(bytes.Repeat([]byte{byte('a' + dice.IntN(26)), byte('A' + dice.IntN(26))}, 1+dice.IntN(30))) + "."
	}
	name += "eXample."
	m := new(dns.Msg).SetQuestion(name, dns.TypeA)
	m.Id = id
	m.RecursionDesired, m.CheckingDisabled = dice.IntN(2) == 0, dice.IntN(8) == 0
	switch dice.IntN(12) {
	case 0:
		m.Question[0].Qtype = dns.TypeANY
	case 1:
		m.Opcode = dns.OpcodeNotify
	case 2:
		m.Question[0].Qtype = dns.TypeAXFR
	case 3:
		m.Question = append(m.Question, m.Question[0])
	case 4:
		m.Question[0].Qclass = dns.ClassCHAOS
	}
	if dice.IntN(2) == 0 {
		m.SetEdns0(uint16(dice.IntN(5000)), dice.IntN(2) == 0) //nolint:gosec // below 65,536
		o := m.IsEdns0()
		switch dice.IntN(5) {
		case 0:
			o.Option = append(o.Option, &dns.EDNS0_PADDING{Padding: bytes.Repeat([]byte("p"), dice.IntN(1600))})
		case 1:
			o.SetVersion(1)
		case 2:
			o.Option = append(o.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"})
		}
	}
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	switch dice.IntN(10) {
	case 0: // cut
		wire = wire[:dice.IntN(len(wire))]
	case 1: // longer, perhaps than is taken in
		wire = append(wire, bytes.Repeat([]byte("t"), dice.IntN(3000))...)
	case 2:
		wire[2] |= 0x80 // an answer
	}
	return wire, len(wire) >= dnswire.HeaderLen && wire[2]&0x80 == 0
}

// checkMixed says what is wrong with an answer to a query.
func checkMixed(query, answer []byte) error {
	var q dnswire.Query
	verdict := dnswire.ParseQuery(query[:min(len(query), datagramLen)], &q)
	if len(query) > datagramLen && verdict == dnswire.Accept {
		verdict = dnswire.FormErr
	}
	a := new(dns.Msg)
	if err := a.Unpack(answer); err != nil {
		return err
	}
	switch {
	case !a.Response || a.Opcode != int(query[2]>>3&15) || a.RecursionDesired != (query[2]&1 != 0) || a.CheckingDisabled != (query[3]&0x10 != 0):
		return fmt.Errorf("flags of %v", a)
	case q.NameLen == 0 && len(a.Question) > 0, q.NameLen > 0 && !bytes.Equal(answer[dnswire.HeaderLen:q.QuestionEnd()], query[dnswire.HeaderLen:q.QuestionEnd()]):
		return fmt.Errorf("question of %v", a)
	case len(answer) > max(512, int(min(q.UDPSize, udpSize))):
		return fmt.Errorf("%d octets for %d", len(answer), q.UDPSize)
	case (a.IsEdns0() != nil) != q.EDNS:
		return fmt.Errorf("OPT of %v", a)
	}
	want := map[dnswire.Verdict]int{dnswire.FormErr: dns.RcodeFormatError, dnswire.NotImp: dns.RcodeNotImplemented, dnswire.BadVers: dns.RcodeBadVers}[verdict]
	if verdict != dnswire.Accept {
		if a.Rcode != want || len(a.Answer)+len(a.Ns) > 0 {
			return fmt.Errorf("want rcode %d and no records: %v", want, a)
		}
		return nil
	}
	records := 0
	switch kind := q.Name(query)[1]; {
	case q.Class != dnswire.ClassIN, q.Type == dnswire.TypeAXFR:
		want = dns.RcodeNotImplemented
	case q.Type == dnswire.TypeANY:
		records = 1
	case kind == 'x':
		want = dns.RcodeNameError
	case kind == 'f':
		want = dns.RcodeServerFailure
	case kind != 'l':
		records = 1
	case !a.Truncated || q.DO && len(a.Answer) > 0 || !q.DO && len(a.Answer) < 10:
		return fmt.Errorf("not cut to size: %v", a)
	default:
		records = len(a.Answer)
	}
	if a.Rcode != want || len(a.Answer) != records {
		return fmt.Errorf("rcode %d and %d records, want %d and %d: %v", a.Rcode, len(a.Answer), want, records, a)
	}
	for i, r := range a.Answer {
		if r.Header().Name != a.Question[0].Name {
			return fmt.Errorf("owner of %v", r)
		}
		if r, ok := r.(*dns.A); ok {
			asked := dns.CanonicalName(a.Question[0].Name) + string(bytes.Repeat([]byte("+"), i))
			if r.A.String() != mixedAddr(asked) {
				return fmt.Errorf("record %d of %v", i, a)
			}
		}
	}
	return nil
}

// TestMixedBatches asks what hits, what misses, what fails and what is malformed, of
// all sizes, many at a time from several sockets: each answer is that to its query, and
// each query is counted once.
func TestMixedBatches(t *testing.T) {
	for listen, ask := range map[string]string{"127.0.0.1:0": "127.0.0.1", "[::1]:0": "::1", "0.0.0.0:0": "127.0.0.2", "[::]:0": "::1"} {
		t.Run(listen, func(t *testing.T) {
			r := newTestResolver(t, mixedUpstream(t))
			ep := serve(t, r, listen, 1)
			addr := netip.AddrPortFrom(netip.MustParseAddr(ask), ep.Addr.Port())
			var asking sync.WaitGroup
			var deserved atomic.Uint64
			var client netip.Addr
			const askers, rounds, burst = 4, 10, 48
			for i := range askers {
				c := dial(t, "udp", addr)
				client = c.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
				asking.Go(func() {
					dice := rand.New(rand.NewPCG(uint64(i), 7)) //nolint:gosec // a test
					var id uint16
					buf := make([]byte, 65535)
					for range rounds {
						waiting := map[uint16][]byte{}
						for range burst {
							id++
							wire, answered := mixedQuery(t, dice, id)
							if answered {
								waiting[id] = wire
								deserved.Add(1)
							}
							if _, err := c.Write(wire); err != nil {
								t.Error(err)
								return
							}
						}
						for len(waiting) > 0 {
							n, err := c.Read(buf)
							if err != nil {
								t.Errorf("%d without an answer: %v", len(waiting), err)
								return
							}
							q, ok := waiting[dnswire.ID(buf)]
							if !ok {
								t.Errorf("answer %x to nothing that was asked", buf[:n])
								return
							}
							delete(waiting, dnswire.ID(buf))
							if err := checkMixed(q, buf[:n]); err != nil {
								t.Errorf("query %x: answer %x: %v", q, buf[:n], err)
							}
						}
					}
				})
			}
			asking.Wait()
			// What comes last may deserve no answer.
			const sent = askers * rounds * burst
			for start := time.Now(); r.Received(client, UDP) < sent && time.Since(start) < 10*time.Second; {
				time.Sleep(time.Millisecond)
			}
			s := r.Stats()
			var answers uint64
			for _, n := range s.Responses {
				answers += n
			}
			if got := r.Received(client, UDP); got != sent || s.Queries[UDP] != deserved.Load() || answers != deserved.Load() || s.Dropped != sent-deserved.Load() {
				t.Errorf("%d heard of %d sent, %d dropped; %d queries and %d answers, want %d", got, sent, s.Dropped, s.Queries[UDP], answers, deserved.Load())
			}
		})
	}
}
