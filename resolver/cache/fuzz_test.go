package cache

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// wantReply is what the whole reply, without OPT, to query must say age after
// the answer came, by way of whole messages: a model of Store and AppendReply.
func wantReply(answer, query *dns.Msg, kind dnswire.Kind, zone Zone, age uint32, trustAD bool) *dns.Msg {
	m := answer.Copy()
	m.Id, m.Question = query.Id, query.Question
	m.RecursionDesired, m.CheckingDisabled = query.RecursionDesired, query.CheckingDisabled
	m.RecursionAvailable, m.Zero = true, false
	opt := query.IsEdns0()
	m.AuthenticatedData = answer.AuthenticatedData && trustAD && (query.AuthenticatedData || opt != nil && opt.Do())
	denial := kind == dnswire.NoData || kind == dnswire.NXDomain
	for i, section := range []*[]dns.RR{&m.Answer, &m.Ns, &m.Extra} {
		var out []dns.RR
		for len(*section) > 0 {
			set, rest := splitSet(*section)
			*section = rest
			if set[0].Header().Rrtype == dns.TypeOPT {
				continue
			}
			limit := seconds(zone.Positive)
			_, soa := set[0].(*dns.SOA)
			if soa = soa && denial && i == 1; soa {
				limit = seconds(zone.Negative)
			}
			for _, rr := range set {
				if soa {
					limit = min(limit, rr.(*dns.SOA).Minttl)
				}
				ttl := rr.Header().Ttl
				if ttl > 1<<31-1 {
					ttl = 0
				}
				limit = min(limit, ttl)
			}
			for _, rr := range set {
				rr.Header().Ttl = limit - min(limit, age)
				if strings.EqualFold(rr.Header().Name, query.Question[0].Name) {
					rr.Header().Name = query.Question[0].Name
				}
			}
			out = append(out, set...)
		}
		*section = out
	}
	return m
}

// splitSet takes the first record's RRset out of rrs.
func splitSet(rrs []dns.RR) (set, rest []dns.RR) {
	for _, rr := range rrs {
		if sameSetRR(rrs[0], rr) {
			set = append(set, rr)
		} else {
			rest = append(rest, rr)
		}
	}
	return set, rest
}

func sameSetRR(a, b dns.RR) bool {
	x, y := a.Header(), b.Header()
	if x.Rrtype != y.Rrtype || x.Class != y.Class || dns.CanonicalName(x.Name) != dns.CanonicalName(y.Name) {
		return false
	}
	s, signed := a.(*dns.RRSIG)
	return !signed || s.TypeCovered == b.(*dns.RRSIG).TypeCovered
}

// lines are a message as text, for comparison. Names in RDATA may follow the
// client's case (they may point into the question), so only owners and text
// are compared by case.
func lines(m *dns.Msg) []string {
	h := *m
	h.Question, h.Answer, h.Ns, h.Extra, h.Compress = nil, nil, nil, nil, false
	out := []string{h.String(), m.Question[0].String()}
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		out = append(out, "--")
		for _, rr := range section {
			if opt, ok := rr.(*dns.OPT); ok {
				out = append(out, opt.String())
				continue
			}
			line := rr.String()
			if rr.Header().Rrtype != dns.TypeTXT {
				owner := rr.Header().String()
				line = owner + strings.ToLower(strings.TrimPrefix(line, owner))
			}
			if !strings.EqualFold(rr.Header().Name, m.Question[0].Name) {
				line = strings.ToLower(line)
			}
			out = append(out, line)
		}
	}
	return out
}

// A reply says what the answer said, but for the rules; a hit is octet for
// octet what those who waited would have got at that instant; a cut reply is
// the whole one without its last RRsets.
func FuzzReply(f *testing.F) {
	for i := range 64 {
		f.Add([]byte{byte(i), byte(i * 7), byte(i * 31), byte(i * 101)})
	}
	f.Add([]byte{})
	zone := Zone{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := newCache(t, 1<<20)
		g := newGenerator(data)
		answer := g.answer()
		wire, err := answer.Pack()
		if err != nil {
			t.Skip("no message: ", err)
		}
		var r dnswire.Response
		if err := dnswire.ParseResponse(wire, &r); err != nil {
			t.Fatalf("answer is refused: %v\n%v", err, answer)
		}
		if err := answer.Unpack(wire); err != nil {
			t.Fatal(err)
		}
		sum := r.Classify(wire)
		query := g.query(answer)
		edns := query.IsEdns0() != nil
		do := edns && query.IsEdns0().Do()
		qwire, err := query.Pack()
		if err != nil {
			t.Fatal(err)
		}
		var q dnswire.Query
		if v := dnswire.ParseQuery(qwire, &q); v != dnswire.Accept {
			t.Fatalf("query is refused: %v", v)
		}
		key := AppendKey(nil, q.Name(qwire), q.Type, q.Class, q.DO, q.CD())
		const stored = 90 * time.Second
		before := bytes.Clone(wire)
		e, cached := c.Store(key, wire, &r, stored)
		if !bytes.Equal(before, wire) {
			t.Fatal("Store changed the answer")
		}
		if len(e.blob) == 0 {
			// Repacked names may need more room than there is.
			answer.Compress = true
			if answer.Len() < dnswire.MaxMsgLen {
				t.Fatalf("not to be sent:\n%v", answer)
			}
			t.Skip("too long")
		}
		age := uint32(g.n(256))
		now := stored + time.Duration(age)*time.Second + time.Duration(g.n(256))*time.Millisecond
		o := ReplyOptions{Now: now, TrustAD: g.chance(50)}
		reply := e.AppendReply(nil, qwire, &q, o)
		var got dns.Msg
		if err := got.Unpack(reply); err != nil {
			t.Fatalf("reply: %v\n%x", err, reply)
		}
		if opt := got.IsEdns0(); (opt != nil) != edns || opt != nil && (opt.Do() != do || opt.UDPSize() != udpSize || len(opt.Option) != 0) {
			t.Fatalf("OPT %v for\n%v", opt, query)
		}
		got.Extra = slices.DeleteFunc(got.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
		want := wantReply(answer, query, sum.Kind, zone, age, o.TrustAD)
		if diff := cmp.Diff(lines(want), lines(&got)); diff != "" {
			t.Fatalf("reply to\n%v\nafter %d s from\n%v\n-want +got\n%s", query, age, answer, diff)
		}
		if !bytes.Equal(reply[dnswire.HeaderLen:q.QuestionEnd()], qwire[dnswire.HeaderLen:q.QuestionEnd()]) {
			t.Fatal("the question came back changed")
		}

		hit, kind := c.Lookup(key, now)
		if fresh := cached && now < stored+e.life(); fresh != (kind == Positive || kind == Negative) {
			t.Fatalf("cached %v, life %v, age %d: found %v", cached, e.life(), age, kind)
		}
		if kind == Positive || kind == Negative {
			if again := hit.AppendReply(nil, qwire, &q, o); !bytes.Equal(again, reply) {
				t.Fatalf("a hit is not what a waiter got:\n%x\n%x", again, reply)
			}
		}

		o.Limit = pick(g, 512, 1232, 4096)
		short := e.AppendReply(nil, qwire, &q, o)
		var cut dns.Msg
		if err := cut.Unpack(short); err != nil {
			t.Fatalf("cut reply: %v", err)
		}
		if len(short) > o.Limit {
			t.Fatalf("%d octets, limit %d", len(short), o.Limit)
		}
		cut.Extra = slices.DeleteFunc(cut.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
		isPrefix(t, &got, &cut, do)
		missed := len(cut.Answer) < len(got.Answer) || len(cut.Ns) < len(got.Ns) && (do || len(got.Answer) == 0)
		for _, rr := range got.Ns[len(cut.Ns):] {
			missed = missed || rr.Header().Rrtype == dns.TypeSOA
		}
		if cut.Truncated != missed {
			t.Fatalf("TC is %v for %d of %d answer and %d of %d authority records", cut.Truncated, len(cut.Answer), len(got.Answer), len(cut.Ns), len(got.Ns))
		}
	})
}

// isPrefix checks that short is whole without its last RRsets, or, with TC, with
// a part of the answer section's last one if the client does not validate.
func isPrefix(t *testing.T, whole, short *dns.Msg, do bool) {
	t.Helper()
	open := true // nothing has been left out yet
	for i, pair := range [][2][]dns.RR{{whole.Answer, short.Answer}, {whole.Ns, short.Ns}, {whole.Extra, short.Extra}} {
		all, some := pair[0], pair[1]
		if len(some) > len(all) || !open && len(some) > 0 {
			t.Fatalf("section %d: %d records of %d after something was left out", i, len(some), len(all))
		}
		for j := range some {
			if all[j].String() != some[j].String() {
				t.Fatalf("section %d: %v instead of %v", i, some[j], all[j])
			}
		}
		if n := len(some); n < len(all) {
			open = false
			partial := i == 0 && short.Truncated && !do
			if n > 0 && sameSetRR(all[n-1], all[n]) && !partial {
				t.Fatalf("section %d: RRset of %v is cut", i, all[n])
			}
		}
	}
}

// Whatever ParseResponse accepts, at any age, what AppendReply makes of it is
// accepted too, and no panic.
func FuzzRaw(f *testing.F) {
	for i := range 32 {
		if wire, err := newGenerator([]byte{byte(i * 13)}).answer().Pack(); err == nil {
			f.Add(wire)
		}
	}
	f.Add(nameInTTL())
	f.Add(targetInTTL())
	f.Fuzz(func(t *testing.T, wire []byte) {
		c := newCache(t, 1<<20)
		var r dnswire.Response
		if len(wire) > dnswire.MaxMsgLen || dnswire.ParseResponse(wire, &r) != nil || r.NameLen == 0 {
			t.Skip("no answer")
		}
		if r.Unchecked && new(dns.Msg).Unpack(wire) != nil {
			t.Skip("not to be accepted by the forwarder")
		}
		name := wire[dnswire.HeaderLen : dnswire.HeaderLen+r.NameLen]
		key := AppendKey(nil, name, r.Type, r.Class, false, false)
		e, _ := c.Store(key, wire, &r, 0)
		query := dnswire.AppendQuery(nil, 7, dnswire.FlagRD, name, r.Type, r.Class, &dnswire.OPT{Size: 1232})
		var q dnswire.Query
		if v := dnswire.ParseQuery(query, &q); v != dnswire.Accept {
			t.Skip("not to be asked")
		}
		for _, o := range []ReplyOptions{
			{}, {Now: time.Second}, {Now: 97 * time.Second}, {Now: 100 * time.Hour}, {Stale: true}, {Limit: 512}, {Limit: 1232, Stale: true},
		} {
			reply := e.AppendReply(nil, query, &q, o)
			var again dnswire.Response
			if err := dnswire.ParseResponse(reply, &again); err != nil {
				t.Fatalf("%+v: %v\n%x\n%x", o, err, wire, reply)
			}
			if again.ID != 7 || !again.EDNS || o.Limit > 0 && len(reply) > o.Limit {
				t.Fatalf("%+v: id %d, EDNS %v, %d octets", o, again.ID, again.EDNS, len(reply))
			}
			if o.Limit == 0 && len(e.blob) > 0 && len(again.Records) != len(r.Records) {
				t.Fatalf("%+v: %d records of %d", o, len(again.Records), len(r.Records))
			}
		}
	})
}
