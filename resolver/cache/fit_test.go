package cache

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// fitted is what a reply that was cut has.
type fitted struct {
	AN, NS, AR int
	TC         bool
}

// plainFit is Entry.fit written again on whole messages: the records are grouped
// into RRsets, and whole RRsets are taken as long as they fit. Of the first that
// does not, what fits is taken if it is in the answer section, unless the client
// validates. ends has where each record ends in the reply.
func plainFit(m *dns.Msg, ends []int, limit int, do bool) (f fitted) {
	n, full := 0, false
	for s, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		taken := 0
		for len(section) > 0 {
			size := 1
			for size < len(section) && sameFitSet(section[0], section[size]) {
				size++
			}
			switch {
			case full:
			case ends[n+size-1] <= limit:
				taken += size
			default:
				full = true
				for i := 0; s == 0 && !do && ends[n+i] <= limit; i++ {
					taken++
				}
			}
			for _, rr := range section[:size] {
				if full && (s == 0 || s == 1 && (do || len(m.Answer) == 0 || rr.Header().Rrtype == dns.TypeSOA)) {
					f.TC = true
				}
			}
			n += size
			section = section[size:]
		}
		*[]*int{&f.AN, &f.NS, &f.AR}[s] = taken
	}
	return f
}

// sameFitSet is sameSetRR, but all RRSIGs of an owner are one set.
func sameFitSet(a, b dns.RR) bool {
	x, y := a.Header(), b.Header()
	return x.Rrtype == y.Rrtype && x.Class == y.Class && dns.CanonicalName(x.Name) == dns.CanonicalName(y.Name)
}

// checkFit compares what AppendReply makes of an entry under a limit with
// plainFit, and with the whole reply.
func checkFit(t *testing.T, e Entry, query []byte, limit int) fitted {
	t.Helper()
	var q dnswire.Query
	if v := dnswire.ParseQuery(query, &q); v != dnswire.Accept {
		t.Fatal(v)
	}
	whole := e.AppendReply(nil, query, &q, ReplyOptions{})
	got := e.AppendReply(nil, query, &q, ReplyOptions{Limit: limit})
	var r, cut dnswire.Response
	if err := dnswire.ParseResponse(whole, &r); err != nil {
		t.Fatal(err)
	}
	if err := dnswire.ParseResponse(got, &cut); err != nil {
		t.Fatalf("limit %d: what is left is malformed: %v", limit, err)
	}
	var m dns.Msg
	if err := m.Unpack(whole); err != nil {
		t.Fatal(err)
	}
	opt := len(whole) - r.OPTOff
	if !r.EDNS {
		opt = 0
	}
	m.Extra = m.Extra[:len(m.Extra)-min(1, opt)]
	var ends []int
	for i := range r.Records {
		ends = append(ends, r.Records[i].End)
	}
	_, an, ns, ar := dnswire.Counts(got)
	f := fitted{int(an), int(ns), int(ar) - min(1, opt), cut.Flags&dnswire.FlagTC != 0}
	want := plainFit(&m, ends, limit-opt, q.DO)
	if e.Led() > 0 && want.TC {
		want = fitted{TC: true}
	}
	if d := cmp.Diff(want, f); d != "" {
		t.Fatalf("limit %d, DO %v (-want +got):\n%s", limit, q.DO, d)
	}
	end := q.QuestionEnd()
	if n := f.AN + f.NS + f.AR; n > 0 {
		end = ends[n-1]
	}
	if !bytes.Equal(got[dnswire.HeaderLen:len(got)-opt], whole[dnswire.HeaderLen:end]) {
		t.Fatalf("limit %d: not the beginning of the whole reply:\n%x\n%x", limit, got, whole)
	}
	if len(got) > max(limit, q.QuestionEnd()+opt) {
		t.Fatalf("limit %d: %d octets", limit, len(got))
	}
	if rcode := dnswire.Flags(got) & rcodeMask; e.Led() > 0 && f.TC && (rcode != dnswire.RcodeNXDomain || f.AN+f.NS+f.AR > 0) || (e.Led() == 0 || !f.TC) && rcode != e.Rcode() {
		t.Fatalf("limit %d: rcode %d with %+v", limit, rcode, f)
	}
	return f
}

// fitEntry stores an answer to www.example for A; records are written with their
// section in front.
func fitEntry(t *testing.T, rcode int, store func(*Cache, []byte, []byte, *dnswire.Response) Entry, records ...string) Entry {
	t.Helper()
	m := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	m.Response, m.Compress, m.Rcode = true, true, rcode
	for _, line := range records {
		section, text, _ := strings.Cut(line, " ")
		rr, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		to := map[string]*[]dns.RR{"an": &m.Answer, "ns": &m.Ns, "ar": &m.Extra}[section]
		*to = append(*to, rr)
	}
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var r dnswire.Response
	if err := dnswire.ParseResponse(wire, &r); err != nil {
		t.Fatal(err)
	}
	e := store(newCache(t, 1<<20), AppendKey(nil, []byte("\x03www\x07example\x00"), dnswire.TypeA, dnswire.ClassIN, false, false), wire, &r)
	if e.Kind() == Miss {
		t.Fatal("not stored")
	}
	return e
}

func stored(c *Cache, key, wire []byte, r *dnswire.Response) Entry {
	e, _ := c.Store(key, wire, r, 0)
	return e
}

func storedLed(c *Cache, key, wire []byte, r *dnswire.Response) Entry {
	e, _ := c.StoreLed(key, wire, r, 0, time.Hour, 4)
	return e
}

// fitQueries are queries for www.example: without EDNS, with it, and with DO.
func fitQueries() map[string][]byte {
	ask := func(o *dnswire.OPT) []byte {
		return dnswire.AppendQuery(nil, 1, dnswire.FlagRD, []byte("\x03www\x07example\x00"), dnswire.TypeA, dnswire.ClassIN, o)
	}
	return map[string][]byte{"plain": ask(nil), "EDNS": ask(&dnswire.OPT{Size: 1232}), "DO": ask(&dnswire.OPT{Size: 1232, DO: true})}
}

// repeated writes n records; %d in the text is the record's number.
func repeated(n int, text string) (records []string) {
	for i := range n {
		records = append(records, strings.ReplaceAll(text, "%d", fmt.Sprint(i+1)))
	}
	return records
}

func with(parts ...[]string) (all []string) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// TestFitEveryLimit cuts every shape of answer at every limit.
func TestFitEveryLimit(t *testing.T) {
	const (
		soa = "ns example. 900 SOA ns.example. host.example. 1 7200 3600 86400 300"
		ns  = "ns example. 900 NS ns%d.example."
	)
	for name, tt := range map[string]struct {
		rcode   int
		records []string
	}{
		"one A":          {records: repeated(1, "an www.example. 60 A 192.0.2.%d")},
		"ten A":          {records: repeated(10, "an www.example. 60 A 192.0.2.%d")},
		"chain":          {records: with([]string{"an www.example. 60 CNAME a.example.", "an a.example. 60 CNAME b.example."}, repeated(4, "an b.example. 60 A 192.0.2.%d"))},
		"in cases":       {records: with([]string{"an www.example. 60 CNAME pool.example."}, repeated(2, "an pool.example. 60 A 192.0.2.%d"), repeated(2, "an POOL.Example. 60 A 192.0.2.10%d"))},
		"signed":         {records: with(repeated(3, "an www.example. 60 A 192.0.2.%d"), repeated(2, "an www.example. 60 RRSIG A %d 2 60 20300101000000 20200101000000 1 example. AAAA"))},
		"all sections":   {records: with(repeated(2, "an www.example. 60 A 192.0.2.%d"), repeated(3, ns), repeated(2, "ar ns1.example. 60 A 192.0.2.%d"), repeated(2, "ar ns2.example. 60 A 192.0.2.%d"))},
		"NXDOMAIN":       {rcode: dns.RcodeNameError, records: []string{soa}},
		"NODATA":         {records: []string{soa, "ns www.example. 900 NSEC x.example. AAAA"}},
		"NODATA, chain":  {records: with([]string{"an www.example. 60 CNAME w.example."}, repeated(1, ns), []string{soa})},
		"large and then": {records: []string{"an www.example. CNAME w.example.", "an w.example. TXT " + strings.Repeat("x", 200), "an w.example. A 192.0.2.1", "ar z. A 192.0.2.1"}},
	} {
		for asked, query := range fitQueries() {
			t.Run(name+", "+asked, func(t *testing.T) {
				for _, store := range []func(*Cache, []byte, []byte, *dnswire.Response) Entry{stored, storedLed} {
					e := fitEntry(t, tt.rcode, store, tt.records...)
					for limit := 1; limit < len(e.body())+100; limit++ {
						checkFit(t, e, query, limit)
					}
				}
			})
		}
	}
}

// TestFit shows what a client gets where the answer does not fit.
func TestFit(t *testing.T) {
	const (
		cname = "an www.example. 60 CNAME w.example."
		a1    = "an www.example. 60 A 192.0.2.1"
		a2    = "an www.example. 60 A 192.0.2.2"
		ns1   = "ns example. 900 NS ns1.example."
		ns2   = "ns example. 900 NS ns2.example."
		soa   = "ns example. 900 SOA ns.example. host.example. 1 7200 3600 86400 300"
	)
	for _, tt := range []struct {
		name    string
		records []string
		less    int // octets less than the whole
		asked   string
		want    fitted
	}{
		{"part of an RRset, with TC", []string{a1, a2}, 1, "plain", fitted{AN: 1, TC: true}},
		{"to whoever asks with EDNS, too", []string{a1, a2}, 1, "EDNS", fitted{AN: 1, TC: true}},
		{"no part of one for a validator", []string{a1, a2}, 1, "DO", fitted{TC: true}},
		{"CNAME stays", []string{cname, "an w.example. 60 A 192.0.2.1"}, 1, "DO", fitted{AN: 1, TC: true}},
		{"CNAME, and a part", []string{cname, "an w.example. 60 A 192.0.2.1", "an w.example. 60 A 192.0.2.2"}, 1, "plain", fitted{AN: 2, TC: true}},
		{"glue is not missed", []string{a1, "ar ns.example. 60 A 192.0.2.1"}, 1, "DO", fitted{AN: 1}},
		{"authority is not missed, and never there in part", []string{a1, ns1, ns2}, 1, "plain", fitted{AN: 1}},
		{"authority is missed by a validator", []string{a1, ns1}, 1, "DO", fitted{AN: 1, TC: true}},
		{"SOA is missed", []string{soa}, 1, "plain", fitted{TC: true}},
		{"SOA behind a CNAME is missed", []string{cname, soa}, 1, "plain", fitted{AN: 1, TC: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := fitEntry(t, dns.RcodeSuccess, stored, tt.records...)
			query := fitQueries()[tt.asked]
			var q dnswire.Query
			dnswire.ParseQuery(query, &q)
			whole := len(e.AppendReply(nil, query, &q, ReplyOptions{}))
			if d := cmp.Diff(tt.want, checkFit(t, e, query, whole-tt.less)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// TestLed: how many questions an answer spares is kept beside its kind.
func TestLed(t *testing.T) {
	for questions, want := range map[int]int{0: 0, 1: 1, 4: 4, 31: 31, 32: 31, 1000: 31} {
		e := fitEntry(t, dns.RcodeSuccess, func(c *Cache, key, wire []byte, r *dnswire.Response) Entry {
			_, kept := c.StoreLed(key, wire, r, 0, time.Hour, questions)
			e, kind := c.Lookup(key, 0)
			if !kept || kind != Positive {
				t.Errorf("kept %v, found %v", kept, kind)
			}
			return e
		}, "an www.example. 60 A 192.0.2.1")
		if e.Led() != want || e.Kind() != Positive || e.Rcode() != dnswire.RcodeNoError {
			t.Errorf("%d: spares %d, want %d; %v, rcode %d", questions, e.Led(), want, e.Kind(), e.Rcode())
		}
	}
	if (Entry{}).Led() != 0 {
		t.Error("the zero Entry spares something")
	}
}

// FuzzFit: whatever ParseResponse accepts is cut like that, at any limit.
func FuzzFit(f *testing.F) {
	for i := range 32 {
		if wire, err := newGenerator([]byte{byte(i * 7)}).answer().Pack(); err == nil {
			f.Add(wire, uint16(i*37), i%2 == 0)
		}
	}
	f.Fuzz(func(t *testing.T, wire []byte, limit uint16, do bool) {
		var r dnswire.Response
		if len(wire) > dnswire.MaxMsgLen || dnswire.ParseResponse(wire, &r) != nil || r.NameLen == 0 {
			t.Skip("no answer")
		}
		if new(dns.Msg).Unpack(wire) != nil {
			t.Skip("not to be accepted by the forwarder")
		}
		name := wire[dnswire.HeaderLen : dnswire.HeaderLen+r.NameLen]
		e, _ := newCache(t, 1<<20).Store(AppendKey(nil, name, r.Type, r.Class, do, false), wire, &r, 0)
		query := dnswire.AppendQuery(nil, 7, dnswire.FlagRD, name, r.Type, r.Class, &dnswire.OPT{Size: 1232, DO: do})
		var q dnswire.Query
		if e.Kind() == Miss || dnswire.ParseQuery(query, &q) != dnswire.Accept {
			t.Skip("not to be asked")
		}
		if new(dns.Msg).Unpack(e.AppendReply(nil, query, &q, ReplyOptions{})) != nil {
			t.Skip("not for miekg/dns to read")
		}
		checkFit(t, e, query, max(1, int(limit)))
	})
}
