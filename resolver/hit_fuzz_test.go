package resolver

import (
	"bytes"
	"context"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// rawForwarder answers every question with the same octets.
type rawForwarder []byte

func (f rawForwarder) Exchange(context.Context, upstream.Question) (upstream.Answer, error) {
	a := upstream.Answer{Msg: bytes.Clone(f)}
	return a, dnswire.ParseResponse(a.Msg, &a.Response)
}

// rawClient keeps the octets that it is answered.
type rawClient struct {
	source
	s       *scratch
	answers chan []byte
}

func (c *rawClient) owe()                        {}
func (c *rawClient) reply(_ *waiter, msg []byte) { c.answers <- bytes.Clone(msg) }

func (c *rawClient) ask(r *Resolver, query []byte) []byte {
	reply, waits := r.answer(c.s, query, false, &c.source, r.cache.Now(), nil)
	if waits {
		return <-c.answers
	}
	return bytes.Clone(reply)
}

// askInPlace is ask as a UDP reader does it: the answer is written over the query.
func (c *rawClient) askInPlace(r *Resolver, query []byte) []byte {
	buf := make([]byte, datagramLen)
	msg := buf[:copy(buf, query)]
	reply, waits := r.answer(c.s, msg, false, &c.source, r.cache.Now(), buf[:0])
	if waits {
		return <-c.answers
	}
	return reply
}

// FuzzHitEqualsMiss: whatever answer an upstream gives, who asks at the same
// moment gets the same octets, be it from the flight, from the cache, or, where
// the answer is not kept, from another flight; and be they written over the query.
func FuzzHitEqualsMiss(f *testing.F) {
	add := func(change func(m *dns.Msg), flags uint8) {
		m := new(dns.Msg).SetReply(new(dns.Msg).SetQuestion("www.Example.com.", dns.TypeA))
		m.Compress = true
		change(m)
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, flags)
	}
	for flags := range uint8(32) {
		add(func(m *dns.Msg) {
			m.Answer = []dns.RR{rr(f, "www.example.com. 60 IN CNAME a.example.com."), rr(f, "a.example.com. 30 IN A 192.0.2.1")}
		}, flags)
		add(func(m *dns.Msg) {
			for i := range 120 { // more than fits a datagram
				m.Answer = append(m.Answer, rr(f, "www.example.com. 60 IN A 192.0.2.%d", i))
			}
		}, flags)
	}
	add(func(m *dns.Msg) {
		m.Rcode, m.Ns = dns.RcodeNameError, []dns.RR{rr(f, "example.com. 60 IN SOA ns.example.com. h.example.com. 1 2 3 4 5")}
	}, 3)
	add(func(m *dns.Msg) { m.Answer = []dns.RR{rr(f, "www.example.com. 0 IN A 192.0.2.1")} }, 1)
	add(func(m *dns.Msg) { m.SetEdns0(1232, true); m.AuthenticatedData = true }, 1)
	add(func(m *dns.Msg) { m.Rcode = dns.RcodeServerFailure }, 1)
	add(func(m *dns.Msg) { m.Answer = []dns.RR{rr(f, `www.example.com. 60 IN TXT "x"`)} }, 1)
	f.Fuzz(func(t *testing.T, wire []byte, flags uint8) {
		var resp dnswire.Response
		if len(wire) > dnswire.MaxMsgLen || dnswire.ParseResponse(wire, &resp) != nil || resp.NameLen == 0 || resp.Flags&dnswire.FlagTC != 0 {
			t.Skip("not to be had from a forwarder")
		}
		if resp.Unchecked && new(dns.Msg).Unpack(wire) != nil {
			t.Skip("not to be had from a forwarder")
		}
		name := wire[dnswire.HeaderLen : dnswire.HeaderLen+resp.NameLen]
		var opt *dnswire.OPT
		if flags&1 != 0 {
			opt = &dnswire.OPT{Size: 512 << (flags >> 1 & 3), DO: flags&8 != 0}
		}
		query := dnswire.AppendQuery(nil, 7, dnswire.FlagRD, name, resp.Type, resp.Class, opt)
		synctest.Test(t, func(t *testing.T) {
			r := newTestResolver(t, rawForwarder(wire))
			c := &rawClient{s: newScratch(&counters{}), answers: make(chan []byte, 1)}
			c.replier = c
			if c.transport = UDP; flags&16 != 0 {
				c.transport = TCP
			}
			miss := c.ask(r, query)
			hit := c.ask(r, query)
			if !bytes.Equal(miss, hit) {
				t.Errorf("answer %x\nat first %x\nthen     %x", wire, miss, hit)
			}
			if inPlace := c.askInPlace(r, query); !bytes.Equal(miss, inPlace) {
				t.Errorf("answer %x\nat first %x\nin place %x", wire, miss, inPlace)
			}
			if len(miss) > 0 {
				var again dnswire.Response
				if err := dnswire.ParseResponse(miss, &again); err != nil || again.ID != 7 {
					t.Errorf("answer %x\nbecomes %x: %v", wire, miss, err)
				}
			}
			end(t, r)
		})
	})
}
