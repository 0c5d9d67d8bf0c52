package dnswire

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// fitted is the result of Fit.
type fitted struct {
	N          int
	AN, NS, AR uint16
	TC         bool
}

func fit(msg []byte, r *Response, limit int, do bool) fitted {
	var f fitted
	f.N, f.AN, f.NS, f.AR, f.TC = Fit(msg, r, limit, do)
	return f
}

// plainFit is Fit written again on a plain walk over the message: the records
// are grouped into RRsets, and whole RRsets are taken as long as they fit.
func plainFit(t testing.TB, msg []byte, limit int, do bool) fitted {
	t.Helper()
	qd, an, ns, ar := Counts(msg)
	off := HeaderLen
	if qd > 0 {
		_, end, err := dns.UnpackDomainName(msg, off)
		if err != nil {
			t.Fatal(err)
		}
		off = end + 4
	}
	rrs, err := plainWalk(msg, off, int(an)+int(ns)+int(ar))
	if err != nil {
		t.Fatal(err)
	}
	section := func(i int) Section {
		switch {
		case i < int(an):
			return Answer
		case i < int(an)+int(ns):
			return Authority
		}
		return Additional
	}
	f := fitted{N: off}
	for first, full := 0, false; first < len(rrs); {
		next := first + 1
		for next < len(rrs) && section(next) == section(first) && rrs[next].name == rrs[first].name &&
			rrs[next].typ == rrs[first].typ && rrs[next].class == rrs[first].class {
			next++
		}
		full = full || rrs[next-1].end > limit
		for i := first; i < next; i++ {
			switch section(i) {
			case Answer:
				if full {
					f.TC = true
				} else {
					f.AN++
				}
			case Authority:
				if !full {
					f.NS++
				} else if do || an == 0 || rrs[i].typ == TypeSOA {
					f.TC = true
				}
			case Additional:
				if !full {
					f.AR++
				}
			}
		}
		if !full {
			f.N = rrs[next-1].end
		}
		first = next
	}
	return f
}

// checkFit compares Fit with plainFit, and checks what is left of the answer.
func checkFit(t *testing.T, msg []byte, r *Response, limit int, do bool) {
	t.Helper()
	got := fit(msg, r, limit, do)
	if d := cmp.Diff(plainFit(t, msg, limit, do), got); d != "" {
		t.Fatalf("limit %d, DO %t (-want +got):\n%s", limit, do, d)
	}
	question := HeaderLen
	qd := uint16(0)
	if r.NameLen > 0 {
		question += r.NameLen + 4
		qd = 1
	}
	if got.N > max(limit, question) {
		t.Fatalf("limit %d: %d octets", limit, got.N)
	}
	rest := exact(msg[:got.N])
	SetCounts(rest, qd, got.AN, got.NS, got.AR)
	var cut Response
	if err := ParseResponse(rest, &cut); err != nil {
		t.Fatalf("limit %d: what is left is malformed: %v", limit, err)
	}
	if n := len(cut.Records); !slices.Equal(cut.Records, r.Records[:n]) || cut.End != got.N {
		t.Fatalf("limit %d: %d records left, up to %d", limit, n, cut.End)
	}
}

// fitAnswers are answers of all shapes, without OPT.
func fitAnswers(t testing.TB) map[string][]byte {
	const (
		soa = "example. 900 SOA ns.example. host.example. 1 7200 3600 86400 300"
		ns  = "example. 900 NS ns.example."
	)
	a := func(owner string, n int) (rrs []string) {
		for i := range n {
			rrs = append(rrs, owner+" 60 A 192.0.2."+string(rune('0'+i)))
		}
		return rrs
	}
	answers := map[string]answer{
		"nothing":          {},
		"one A":            {an: a("www.example.", 1)},
		"nine A":           {an: a("www.example.", 9)},
		"owners in cases":  {an: slices.Concat(a("www.example.", 2), a("WWW.EXAMPLE.", 2), a("www.Example.", 2)), plain: true},
		"chain":            {an: slices.Concat([]string{"www.example. 60 CNAME a.example.", "a.example. 60 CNAME b.example."}, a("b.example.", 4))},
		"several RRsets":   {qtype: TypeANY, an: slices.Concat(a("www.example.", 3), []string{"www.example. TXT x", "www.example. TXT y", "www.example. MX 1 m.example."})},
		"signed":           {an: slices.Concat(a("www.example.", 2), []string{"www.example. 60 RRSIG A 13 2 60 20300101000000 20200101000000 1 example. AAAA", "www.example. 60 RRSIG A 8 2 60 20300101000000 20200101000000 2 example. AAAA"})},
		"other class":      {an: []string{"www.example. 60 IN TXT a", "www.example. 60 CH TXT a", "www.example. 60 CH TXT b"}},
		"all sections":     {an: a("www.example.", 2), ns: []string{ns, "example. 900 NS ns2.example."}, ar: slices.Concat(a("ns.example.", 2), a("ns2.example.", 2))},
		"NXDOMAIN":         {rcode: dns.RcodeNameError, ns: []string{soa}},
		"NODATA":           {ns: []string{soa, "www.example. 900 NSEC x.example. A"}},
		"NODATA and chain": {an: []string{"www.example. 60 CNAME w.example."}, ns: []string{ns, soa}},
		"referral":         {ns: []string{ns, "example. 900 NS ns2.example."}, ar: a("ns.example.", 3)},
		"same owner and type in every section": {
			qtype: TypeNS, qname: "example.", an: []string{ns}, ns: []string{ns}, ar: []string{ns},
		},
		"large": {qtype: TypeTXT, an: []string{
			`www.example. TXT ` + strings.Repeat(`"`+strings.Repeat("x", 255)+`" `, 9), "www.example. TXT z",
		}, ar: a("z.example.", 9)},
	}
	msgs := map[string][]byte{"FORMERR without a question": header(fQR|RcodeFormErr, 0, 0, 0, 0)}
	for name, a := range answers {
		msgs[name] = a.pack(t)
	}
	return msgs
}

// TestFitEveryLimit cuts every shape of answer at every limit.
func TestFitEveryLimit(t *testing.T) {
	for name, msg := range fitAnswers(t) {
		t.Run(name, func(t *testing.T) {
			before := bytes.Clone(msg)
			r := mustParse(t, msg)
			for limit := range len(msg) + 2 {
				checkFit(t, msg, r, limit, false)
				checkFit(t, msg, r, limit, true)
			}
			if !bytes.Equal(before, msg) {
				t.Error("the message was changed")
			}
			_, an, ns, ar := Counts(msg)
			if got, want := fit(msg, r, len(msg), true), (fitted{len(msg), an, ns, ar, false}); got != want {
				t.Errorf("an answer that fits is cut: %+v, want %+v", got, want)
			}
		})
	}
}

// TestFit shows what a client gets where the answer does not fit.
func TestFit(t *testing.T) {
	const (
		soa = "example. 900 SOA ns.example. host.example. 1 7200 3600 86400 300"
		ns  = "example. 900 NS ns.example."
		a1  = "www.example. 60 A 192.0.2.1"
		a2  = "www.example. 60 A 192.0.2.2"
	)
	question := HeaderLen + 13 + 4
	tests := []struct {
		name string
		a    answer
		cut  int // octets less than the whole
		do   bool
		want fitted
	}{
		{"no partial RRset", answer{an: []string{a1, a2}}, 1, false, fitted{N: question, TC: true}},
		{"CNAME stays", answer{an: []string{"www.example. 60 CNAME w.example.", "w.example. 60 A 192.0.2.1"}}, 1, false, fitted{N: question + 16, AN: 1, TC: true}},
		{"glue is not missed", answer{an: []string{a1}, ar: []string{"ns.example. 60 A 192.0.2.1"}}, 1, true, fitted{N: question + 16, AN: 1}},
		{"authority is not missed", answer{an: []string{a1}, ns: []string{ns}}, 1, false, fitted{N: question + 16, AN: 1}},
		{"authority is missed by a validator", answer{an: []string{a1}, ns: []string{ns}}, 1, true, fitted{N: question + 16, AN: 1, TC: true}},
		{"SOA is missed", answer{ns: []string{soa}}, 1, false, fitted{N: question, TC: true}},
		{"SOA behind a CNAME is missed", answer{an: []string{"www.example. 60 CNAME w.example."}, ns: []string{soa}}, 1, false, fitted{N: question + 16, AN: 1, TC: true}},
		{"referral is missed", answer{ns: []string{ns}}, 1, false, fitted{N: question, TC: true}},
		{"nothing behind the cut, small as it is", answer{an: []string{a1, "www.example. TXT " + strings.Repeat("x", 200)}, ar: []string{"z. A 192.0.2.1"}}, 18, false, fitted{N: question + 16, AN: 1, TC: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg := tt.a.pack(t)
			if got := fit(msg, mustParse(t, msg), len(msg)-tt.cut, tt.do); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}
