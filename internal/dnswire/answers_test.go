package dnswire

import (
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// plainAnswers are answers of all shapes, without OPT.
func plainAnswers(t testing.TB) map[string][]byte {
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
