package cache

import (
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// store stores an answer to the question that it carries, and returns the entry
// and a query for it.
func store(t *testing.T, c *Cache, wire []byte) (e Entry, cached bool, query []byte, q *dnswire.Query) {
	t.Helper()
	r := parse(t, wire)
	name := wire[dnswire.HeaderLen : dnswire.HeaderLen+r.NameLen]
	e, cached = c.Store(AppendKey(nil, name, r.Type, r.Class, false, false), wire, r, 0)
	query = dnswire.AppendQuery(nil, 7, dnswire.FlagRD, name, r.Type, r.Class, nil)
	q = new(dnswire.Query)
	if v := dnswire.ParseQuery(query, q); v != dnswire.Accept {
		t.Fatal(v)
	}
	return e, cached, query, q
}

// nameInTTL returns an answer whose second record's owner is a pointer into the
// first one's TTL, which happens to read as the name "a.".
func nameInTTL() []byte {
	msg := rawAnswer([]byte("\x03www\x07example\x03com\x00"), 0x0161, 2)
	second := dnswire.HeaderLen + 17 + 4 + 16
	msg[second], msg[second+1] = 0xc0, byte(dnswire.HeaderLen+17+4+6+2)
	return msg
}

// targetInTTL is the same for a name in RDATA.
func targetInTTL() []byte {
	msg := rawAnswer([]byte("\x03www\x07example\x03com\x00"), 0x0161, 1)
	msg = append(msg, 0xc0, 12, 0, 12, 0, 1, 0, 0, 1, 0x61, 0, 2, 0xc0, byte(dnswire.HeaderLen+17+4+6+2))
	dnswire.SetCounts(msg, 1, 2, 0, 0)
	return msg
}

// Names that run through a TTL would change as it is aged.
func TestNameInTTL(t *testing.T) {
	for _, tt := range []struct {
		name string
		wire []byte
		got  func(dns.RR) string
	}{
		{"owner", nameInTTL(), func(rr dns.RR) string { return rr.Header().Name }},
		{"target", targetInTTL(), func(rr dns.RR) string { return rr.(*dns.PTR).Ptr }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, cached, query, q := store(t, newCache(t, MinSize), tt.wire)
			if !cached {
				t.Fatal("not cached")
			}
			for _, age := range []time.Duration{0, 1, 100, 352} {
				var m dns.Msg
				if err := m.Unpack(e.AppendReply(nil, query, q, ReplyOptions{Now: age * time.Second})); err != nil {
					t.Fatal(err)
				}
				if got := tt.got(m.Answer[1]); got != "a." {
					t.Errorf("after %d s the name is %q", age, got)
				}
			}
		})
	}
}

// Names in RDATA that should not have been compressed, as those of SRV, are
// spelled out by a repack. What then is longer than a message cannot be sent.
func TestRepackedTooLong(t *testing.T) {
	for _, tt := range []struct {
		name    string
		records int
		cached  bool
	}{{"fits", 1000, true}, {"does not", 2000, false}} {
		t.Run(tt.name, func(t *testing.T) {
			name := []byte("\x04_dns\x04_udp\x07example\x03com\x00")
			wire := dnswire.AppendQuery(nil, 1, dnswire.FlagQR, name, dnswire.TypeSRV, dnswire.ClassIN, nil)
			dnswire.SetCounts(wire, 1, uint16(tt.records), 0, 0)
			for i := range tt.records {
				if i == 0 { // spelled out, and so repacked
					wire = append(wire, name...)
				} else {
					wire = append(wire, 0xc0, 12)
				}
				wire = append(wire, 0, 33, 0, 1, 0, 0, 1, 0x2c, 0, 8, 0, 0, 0, 0, byte(i>>8), byte(i), 0xc0, 12)
			}
			c := newCache(t, 1<<20)
			e, cached, query, q := store(t, c, wire)
			if cached != tt.cached {
				t.Fatalf("cached %v", cached)
			}
			var m dns.Msg
			if err := m.Unpack(e.AppendReply(nil, query, q, ReplyOptions{})); err != nil {
				t.Fatal(err)
			}
			if tt.cached && len(m.Answer) != tt.records || !tt.cached && m.Rcode != dns.RcodeServerFailure {
				t.Errorf("rcode %d, %d answers", m.Rcode, len(m.Answer))
			}
		})
	}
}

// Many RRsets are not compared each with each other.
func TestManySets(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("www.example.com.", dns.TypeA)
	m.Response, m.Compress = true, true
	for i := range 3 * maxSets {
		rr := &dns.A{Hdr: dns.RR_Header{Name: "www.example.com.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: []byte{192, 0, 2, byte(i)}}
		if i > 0 {
			rr.Hdr.Name = string(rune('a'+i%26)) + string(rune('a'+i/26)) + ".example.com."
		}
		m.Answer = append(m.Answer, rr)
	}
	// The first RRset goes on after all others.
	m.Answer = append(m.Answer, dns.Copy(m.Answer[0]))
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	e, cached, query, q := store(t, newCache(t, MinSize), wire)
	var got dns.Msg
	if err := got.Unpack(e.AppendReply(nil, query, q, ReplyOptions{})); err != nil || !cached {
		t.Fatal(cached, err)
	}
	if len(got.Answer) != len(m.Answer) || got.Answer[0].Header().Name != got.Answer[1].Header().Name {
		t.Errorf("%d records, the first two of %s and %s", len(got.Answer), got.Answer[0].Header().Name, got.Answer[1].Header().Name)
	}
}
