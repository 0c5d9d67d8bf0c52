package dnswire

import (
	"testing"
	"time"

	"github.com/miekg/dns"
)

// typical is what the query path sees most: an A query with EDNS, and its answer
// behind one CNAME.
func typical(t testing.TB) (query, reply []byte) {
	name := wireName(t, "kube-dns.kube-system.svc.cluster.local.")
	query = AppendQuery(nil, 1, FlagRD, name, TypeA, ClassIN, &OPT{Size: 1232})
	reply = answer{qname: "www.example.com.", an: []string{
		"www.example.com. 60 CNAME web.example.com.",
		"web.example.com. 30 A 192.0.2.1", "web.example.com. 30 A 192.0.2.2", "web.example.com. 30 A 192.0.2.3",
	}, edns: true}.pack(t)
	return query, reply
}

// hostile is an answer of 64 KB that makes as much work as it can. Its records
// are owned by names of as many labels and pointers as a name can have, written
// down 16 times over in the RDATA of a first record that is never decoded; they
// are equal, or (distinct) differ in their very last label, so that comparing two
// takes all of it. A CNAME leads from the qname to the first of them.
func hostile(section Section, typ uint16, distinct bool, rdata func(name string) string) []byte {
	const typeNULL = 10
	base := HeaderLen + len(qA) + 12
	var names []byte
	var pointers []string
	for i := range 16 {
		to := base + len(names)
		last := byte('a')
		if distinct {
			last += byte(i)
		}
		names = append(names, 1, last, 0)
		for range 124 {
			at := base + len(names)
			names = append(names, 1, 'x', 0xc0|byte(to>>8), byte(to))
			to = at
		}
		pointers = append(pointers, string([]byte{0xc0 | byte(to>>8), byte(to)}))
	}
	counts := [...]uint16{Answer: 2, Authority: 0, Additional: 0}
	msg := wire(header(fQR, 1, 0, 0, 0), qA, record("\xc0\x0c", typeNULL, ClassIN, 60, string(names)),
		record("\xc0\x0c", TypeCNAME, ClassIN, 60, pointers[0]))
	for i := 0; ; i++ {
		name := pointers[1+i%15]
		rr := record(name, typ, ClassIN, 60, rdata(name))
		if len(msg)+len(rr) > MaxMsgLen {
			break
		}
		msg = append(msg, rr...)
		counts[section]++
	}
	SetCounts(msg, 1, counts[Answer], counts[Authority], counts[Additional])
	return exact(msg)
}

func hostileAnswers() map[string][]byte {
	pointer := func(name string) string { return name }
	address := func(string) string { return "\xc0\x00\x02\x01" }
	return map[string][]byte{
		"A":          hostile(Answer, TypeA, true, address),
		"A,same":     hostile(Answer, TypeA, false, address),
		"TXT,same":   hostile(Answer, TypeTXT, false, func(string) string { return "\x00" }),
		"CNAME":      hostile(Answer, TypeCNAME, true, pointer),
		"NS":         hostile(Authority, TypeNS, true, pointer),
		"SOA":        hostile(Authority, TypeSOA, true, func(n string) string { return n + n + "0123456789abcdefghij" }),
		"additional": hostile(Additional, TypeA, false, address),
	}
}

// TestNoAllocations: a datagram costs no garbage.
func TestNoAllocations(t *testing.T) {
	query, reply := typical(t)
	negative := answer{rcode: dns.RcodeNameError, an: []string{"www.example. CNAME w.example."}, ns: []string{"example. SOA a. b. 1 2 3 4 5"}}.pack(t)
	name := foldedName(t, "www.example.com.")
	var (
		q   Query
		r   Response
		neg Response
		buf = make([]byte, 0, 2048)
		o   = OPT{Size: 1232, HasEDE: true, EDE: EDEStale, EDEText: "stale", Keepalive: time.Second}
	)
	if v := ParseQuery(query, &q); v != Accept {
		t.Fatal(v)
	}
	for msg, r := range map[string]*Response{string(reply): &r, string(negative): &neg} {
		if err := ParseResponse([]byte(msg), r); err != nil {
			t.Fatal(err)
		}
	}
	tests := map[string]func(){
		"ParseQuery":         func() { ParseQuery(query, &q) },
		"ParseResponse":      func() { _ = ParseResponse(reply, &r) },
		"Classify":           func() { r.Classify(reply) },
		"Classify, negative": func() { neg.Classify(negative) },
		"AppendError":        func() { AppendError(buf, query, &q, RcodeServFail, o) },
		"AppendOPT":          func() { AppendOPT(buf, &o) },
		"AppendQuery":        func() { AppendQuery(buf, 1, FlagRD, name, TypeA, ClassIN, &o) },
		"AppendName":         func() { AppendName(buf, reply, HeaderLen) },
		"NameEqual":          func() { NameEqual(reply, r.Records[0].Off, r.Records[1].Off) },
		"EqualFold":          func() { EqualFold(name, q.Name(query)) },
	}
	for name, f := range tests {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// TestHostileAnswers checks that the benchmark measures what it says: answers
// that are accepted and nearly as large as they can be.
func TestHostileAnswers(t *testing.T) {
	for name, msg := range hostileAnswers() {
		r := mustParse(t, msg)
		if r.End != len(msg) || len(msg) < MaxMsgLen-64 || len(r.Records) < 1000 {
			t.Errorf("%s: %d octets, %d records", name, r.End, len(r.Records))
		}
		if got := LabelCount(AppendName(nil, msg, r.Records[2].Off)); got != 125 {
			t.Errorf("%s: %d labels", name, got)
		}
		kind := NoData
		if name == "A,same" {
			kind = Positive
		}
		if s := r.Classify(msg); s.Kind != kind {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

func BenchmarkParseQuery(b *testing.B) {
	msg, _ := typical(b)
	b.ReportAllocs()
	var q Query
	for b.Loop() {
		ParseQuery(msg, &q)
	}
}

func BenchmarkParseResponse(b *testing.B) {
	_, msg := typical(b)
	var r Response
	b.ReportAllocs()
	for b.Loop() {
		if err := ParseResponse(msg, &r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkClassify(b *testing.B) {
	_, msg := typical(b)
	r := mustParse(b, msg)
	b.ReportAllocs()
	for b.Loop() {
		r.Classify(msg)
	}
}

func BenchmarkAppendError(b *testing.B) {
	msg, _ := typical(b)
	var q Query
	ParseQuery(msg, &q)
	o := OPT{Size: 1232, HasEDE: true, EDE: EDENoReachable, EDEText: "no upstream answers"}
	buf := make([]byte, 0, 512)
	b.ReportAllocs()
	for b.Loop() {
		AppendError(buf, msg, &q, RcodeServFail, o)
	}
}

func BenchmarkAppendOPT(b *testing.B) {
	o := OPT{Size: 1232}
	buf := make([]byte, 0, 512)
	b.ReportAllocs()
	for b.Loop() {
		AppendOPT(buf, &o)
	}
}

func BenchmarkAppendQuery(b *testing.B) {
	name := foldedName(b, "kube-dns.kube-system.svc.cluster.local.")
	o := OPT{Size: 1232}
	buf := make([]byte, 0, 512)
	b.ReportAllocs()
	for b.Loop() {
		AppendQuery(buf, 1, FlagRD, name, TypeA, ClassIN, &o)
	}
}

// BenchmarkHostile: reading 64 KB of the worst names is the bound; Classify must
// not cost a multiple of it.
func BenchmarkHostile(b *testing.B) {
	for name, msg := range hostileAnswers() {
		r := mustParse(b, msg)
		b.Run(name+"/ParseResponse", func(b *testing.B) {
			for b.Loop() {
				if err := ParseResponse(msg, r); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/Classify", func(b *testing.B) {
			for b.Loop() {
				r.Classify(msg)
			}
		})
	}
}
