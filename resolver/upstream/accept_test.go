package upstream

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
)

// FuzzWrongAnswers sends any octets before the right answer, under the right id.
// Unless they are, by miekg/dns's reading, an answer to the question, they must
// not end the wait.
func FuzzWrongAnswers(f *testing.F) {
	q := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	seed := func(change func(m *dns.Msg)) {
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: "www.example.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: []byte{6, 6, 6, 6}}}
		change(m)
		msg, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(msg)
	}
	seed(func(*dns.Msg) {})
	seed(func(m *dns.Msg) { m.Truncated = true })
	seed(func(m *dns.Msg) { m.Response = false })
	seed(func(m *dns.Msg) { m.Question[0].Name = "ww2.example." })
	seed(func(m *dns.Msg) { m.Question[0].Name = "WWW.example." })
	seed(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA })
	seed(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })
	seed(func(m *dns.Msg) { m.Question, m.Answer = nil, nil })
	seed(func(m *dns.Msg) { m.Question, m.Answer, m.Rcode = nil, nil, dns.RcodeServerFailure })
	seed(func(m *dns.Msg) { m.SetEdns0(1232, true) })
	f.Add([]byte{})
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if len(msg) > datagramLen {
			return
		}
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, func(q *fakeQuery) {
				if len(msg) >= 2 {
					msg[0], msg[1] = byte(q.Id>>8), byte(q.Id)
				}
				q.raw(0, msg)
				q.reply(ms, q.good())
			})
			f := n.forwarder(Config{Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
			ans, err := f.Exchange(t.Context(), query("www.example."))
			if isAnswer(msg) {
				return
			}
			if err != nil || !strings.Contains(string(ans.Msg), "\xcb\x00\x71\x01") {
				t.Errorf("%x ended the wait with %x, error %v", msg, ans.Msg, err)
			}
		})
	})
}

// isAnswer reports whether the message answers the question www.example. A, in
// the reading of miekg/dns, or is an error without a question, or TC, both of
// which need not be readable to the end.
func isAnswer(msg []byte) bool {
	if len(msg) < 12 {
		return false
	}
	m := new(dns.Msg)
	err := m.Unpack(msg)
	if !m.Response || m.Opcode != dns.OpcodeQuery {
		return false
	}
	if len(m.Question) == 0 {
		return err == nil && m.Rcode != 0 && len(m.Answer)+len(m.Ns) == 0
	}
	if len(m.Question) != 1 || !strings.EqualFold(m.Question[0].Name, "www.example.") ||
		m.Question[0].Qtype != dns.TypeA || m.Question[0].Qclass != dns.ClassINET {
		return false
	}
	return err == nil || m.Truncated
}
