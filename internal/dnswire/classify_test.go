package dnswire

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func TestClassify(t *testing.T) {
	const (
		nxdomain = dns.RcodeNameError
		soa      = "example. 900 SOA ns.example. host.example. 1 7200 3600 86400 300"
		ns1      = "example. 3600 NS ns1.example."
		ns2      = "example. 3600 NS ns2.example."
		glue     = "ns1.example. 3600 A 192.0.2.53"
		a        = "www.example. 60 A 192.0.2.1"
	)
	chain := func(n int) []string { // www -> c1 -> c2 ... -> cn
		var c []string
		from := "www"
		for i := range n {
			to := fmt.Sprintf("c%d", i+1)
			c = append(c, fmt.Sprintf("%s.example. 60 CNAME %s.example.", from, to))
			from = to
		}
		return c
	}
	negative := func(k Kind, ttl uint32) Summary { return Summary{Kind: k, TTL: ttl, Cacheable: true} }
	positive := func(ttl uint32) Summary { return Summary{Kind: Positive, TTL: ttl, Cacheable: true} }

	tests := []struct {
		name string
		a    answer
		want Summary
	}{
		// Positive answers.
		{"A", answer{an: []string{a}}, positive(60)},
		{"two A, other case", answer{an: []string{"WWW.example. 60 A 192.0.2.1", "www.EXAMPLE. 50 A 192.0.2.2"}}, positive(50)},
		{"least TTL in the authority section", answer{an: []string{a}, ns: []string{"example. 5 NS ns."}}, positive(5)},
		{"least TTL in the additional section", answer{an: []string{a}, ar: []string{"ns. 6 A 192.0.2.1"}, edns: true}, positive(6)},
		{"TTL 0", answer{an: []string{"www.example. 0 A 192.0.2.1"}}, positive(0)},
		{"greatest TTL", answer{an: []string{"www.example. 2147483647 A 192.0.2.1"}}, positive(1<<31 - 1)},
		{"TTL with the top bit", answer{an: []string{"www.example. 2147483648 A 192.0.2.1"}}, positive(0)},
		{"ANY", answer{qtype: TypeANY, an: []string{"www.example. 60 TXT x"}}, positive(60)},
		{"ANY with a CNAME", answer{qtype: TypeANY, an: chain(1)}, positive(60)},
		{"CNAME asked for", answer{qtype: TypeCNAME, an: chain(1)}, positive(60)},
		{"SOA at the root", answer{qname: ".", qtype: TypeSOA, an: []string{". 60 SOA a. b. 1 2 3 4 5"}}, positive(60)},
		{"with an SOA in the authority section", answer{an: []string{a}, ns: []string{soa}}, positive(60)},
		{"truncated", answer{tc: true, an: []string{a}}, Summary{Kind: Positive, TTL: 60}},

		// Chains.
		{"chain", answer{an: append(chain(3), "c3.example. 30 A 192.0.2.1")}, positive(30)},
		{"chain behind its end", answer{an: append([]string{"c3.example. 30 A 192.0.2.1"}, chain(3)...)}, positive(30)},
		{"chain backwards", answer{an: append([]string{"c3.example. 30 A 192.0.2.1"}, reversed(chain(3))...)}, positive(30)},
		{"chain of 16", answer{an: append(chain(16), "c16.example. 30 A 192.0.2.1")}, positive(30)},
		{"chain of 16, backwards", answer{an: append(reversed(chain(16)), "c16.example. 30 A 192.0.2.1")}, positive(30)},
		{"chain of 17", answer{an: append(chain(17), "c17.example. 30 A 192.0.2.1")}, Summary{Kind: NoData}},
		{"chain with a doubled CNAME", answer{an: append(append(chain(1), chain(1)...), "c1.example. 30 A 192.0.2.1")}, positive(30)},
		{
			"the first of two CNAMEs of a name counts", // RFC 2181 section 10.1 forbids the second
			answer{an: []string{chain(1)[0], "www.example. 60 CNAME other.example.", "c1.example. 30 A 192.0.2.1"}}, positive(30),
		},
		{"CNAMEs of others", answer{an: append([]string{"x.example. 60 CNAME www.example.", "y.example. 60 CNAME z.example."}, a)}, positive(60)},
		{"CNAME by DNAME", answer{
			qname: "www.old.example.",
			an:    []string{"old.example. 60 DNAME example.", "www.old.example. 60 CNAME www.example.", a},
		}, positive(60)},
		{"loop of one", answer{an: []string{"www.example. 60 CNAME www.example."}, ns: []string{soa}}, Summary{Kind: NoData}},
		{"loop of three", answer{an: append(chain(2), "c2.example. 60 CNAME www.example."), ns: []string{soa}}, Summary{Kind: NoData}},
		{"loop behind the qname", answer{an: append(chain(2), "c2.example. 60 CNAME c1.example."), ns: []string{soa}}, Summary{Kind: NoData}},
		{"loop, NXDOMAIN", answer{rcode: nxdomain, an: []string{"www.example. 60 CNAME WWW.example."}, ns: []string{soa}}, Summary{Kind: NXDomain}},
		{"data beside a CNAME", answer{an: append(chain(1), a), ns: []string{soa}}, negative(NoData, 60)},
		{"data of another name", answer{an: []string{"other.example. 60 A 192.0.2.1"}}, Summary{Kind: NoData}},
		{"data behind a gap in the chain", answer{an: []string{chain(2)[1], "c2.example. 60 A 192.0.2.1"}}, Summary{Kind: NoData}},
		{"data of another type", answer{an: []string{"www.example. 60 TXT x"}}, Summary{Kind: NoData}},
		{"data in the additional section", answer{ar: []string{a}}, Summary{Kind: NoData}},
		{"CNAME in the authority section", answer{ns: chain(1), an: []string{"c1.example. 60 A 192.0.2.1"}}, Summary{Kind: NoData}},

		// NXDOMAIN, RFC 2308 section 2.1.
		{"NXDOMAIN type 1", answer{rcode: nxdomain, ns: []string{soa, ns1, ns2}, ar: []string{glue}}, negative(NXDomain, 300)},
		{"NXDOMAIN type 2", answer{rcode: nxdomain, ns: []string{soa}}, negative(NXDomain, 300)},
		{"NXDOMAIN type 3", answer{rcode: nxdomain}, Summary{Kind: NXDomain}},
		{"NXDOMAIN type 4", answer{rcode: nxdomain, ns: []string{ns1, ns2}, ar: []string{glue}}, Summary{Kind: NXDomain}},
		{"NXDOMAIN behind a CNAME, type 1", answer{rcode: nxdomain, an: chain(1), ns: []string{soa, ns1}}, negative(NXDomain, 60)},
		{"NXDOMAIN behind a CNAME, type 2", answer{rcode: nxdomain, an: chain(1), ns: []string{soa}}, negative(NXDomain, 60)},
		{"NXDOMAIN behind a CNAME, type 3", answer{rcode: nxdomain, an: chain(1)}, Summary{Kind: NXDomain}},
		{"NXDOMAIN behind a CNAME, type 4", answer{rcode: nxdomain, an: chain(1), ns: []string{ns1}}, Summary{Kind: NXDomain}},
		{"NXDOMAIN, AA", answer{rcode: nxdomain, aa: true, ns: []string{soa}}, negative(NXDomain, 300)},
		{"NXDOMAIN, truncated", answer{rcode: nxdomain, tc: true, ns: []string{soa}}, Summary{Kind: NXDomain}},
		{"NXDOMAIN with data", answer{rcode: nxdomain, an: []string{a}, ns: []string{soa}}, Summary{Kind: NXDomain}},
		{"NXDOMAIN for ANY", answer{qtype: TypeANY, rcode: nxdomain, ns: []string{soa}}, negative(NXDomain, 300)},

		// NODATA and referrals, section 2.2.
		{"NODATA type 1", answer{ns: []string{soa, ns1, ns2}, ar: []string{glue}}, negative(NoData, 300)},
		{"NODATA type 2", answer{ns: []string{soa}}, negative(NoData, 300)},
		{"NODATA type 3", answer{}, Summary{Kind: NoData}},
		{"NODATA behind a CNAME", answer{an: chain(1), ns: []string{soa}}, negative(NoData, 60)},
		{"NODATA behind a CNAME, no SOA", answer{an: chain(1)}, Summary{Kind: NoData}},
		{"NODATA, truncated", answer{tc: true, ns: []string{soa}}, Summary{Kind: NoData}},
		{"referral", answer{ns: []string{ns1, ns2}, ar: []string{glue}}, Summary{Kind: Referral}},
		{"referral to the root", answer{ns: []string{". 3600 NS a.root-servers.net."}}, Summary{Kind: Referral}},
		{"referral, AA", answer{aa: true, ns: []string{ns1}}, Summary{Kind: Referral}},
		{"referral behind a CNAME", answer{aa: true, an: chain(1), ns: []string{ns1}}, Summary{Kind: Referral}},
		{"referral for another name", answer{ns: []string{"org. 3600 NS ns.org."}}, Summary{Kind: NoData}},
		{
			"referral for the qname but not for the end of the chain",
			answer{an: []string{"www.example. 60 CNAME www.org."}, ns: []string{ns1}},
			Summary{Kind: NoData},
		},
		{"SOA that does not cover the name, and NS", answer{ns: []string{"org. 900 SOA a. b. 1 2 3 4 5", ns1}}, Summary{Kind: NoData}},

		// The SOA record.
		{"SOA TTL below MINIMUM", answer{ns: []string{"example. 10 SOA a. b. 1 2 3 4 300"}}, negative(NoData, 10)},
		{"SOA MINIMUM 0", answer{ns: []string{"example. 10 SOA a. b. 1 2 3 4 0"}}, negative(NoData, 0)},
		{"SOA MINIMUM with the top bit", answer{ns: []string{"example. 10 SOA a. b. 1 2 3 4 2147483648"}}, negative(NoData, 0)},
		{"SOA TTL with the top bit", answer{ns: []string{"example. 2147483648 SOA a. b. 1 2 3 4 5"}}, negative(NoData, 0)},
		{"least TTL is the CNAME's", answer{an: []string{"www.example. 7 CNAME w.example."}, ns: []string{soa}}, negative(NoData, 7)},
		{"SOA of the root", answer{ns: []string{". 900 SOA a. b. 1 2 3 4 5"}}, negative(NoData, 5)},
		{"SOA of the name", answer{ns: []string{"WWW.example. 900 SOA a. b. 1 2 3 4 5"}}, negative(NoData, 5)},
		{"SOA of a sibling", answer{ns: []string{"ww.example. 900 SOA a. b. 1 2 3 4 5"}}, Summary{Kind: NoData}},
		{"SOA of a subdomain", answer{ns: []string{"x.www.example. 900 SOA a. b. 1 2 3 4 5"}}, Summary{Kind: NoData}},
		{
			"SOA of the qname but not of the end of the chain",
			answer{an: []string{"www.example. 60 CNAME www.org."}, ns: []string{soa}},
			Summary{Kind: NoData},
		},
		{
			"SOA of the end of the chain",
			answer{an: []string{"www.example. 60 CNAME www.org."}, ns: []string{"org. 900 SOA a. b. 1 2 3 4 5"}},
			negative(NoData, 5),
		},
		{
			"two SOAs, one covers the name", // the chain's first zone sent its own, too
			answer{an: []string{"www.example. 60 CNAME www.org."}, ns: []string{"org. 900 SOA a. b. 1 2 3 4 5", soa}}, negative(NoData, 5),
		},
		{"two SOAs that cover the name", answer{ns: []string{soa, ". 9 SOA a. b. 1 2 3 4 5"}}, negative(NoData, 9)},
		{"SOA in the answer section", answer{an: []string{soa}}, Summary{Kind: NoData}},
		{"SOA in the additional section", answer{ar: []string{soa}}, Summary{Kind: NoData}},
		{"SOA of another class", answer{ns: []string{"example. 900 CH SOA a. b. 1 2 3 4 5"}}, Summary{Kind: NoData}},
		{"data of another class", answer{an: []string{"www.example. 60 CH A 192.0.2.1"}, ns: []string{soa}}, negative(NoData, 60)},
		{"CNAME of another class", answer{an: []string{"www.example. 60 CH CNAME c.example.", a}}, positive(60)},

		// Failures.
		{"FORMERR", answer{rcode: dns.RcodeFormatError}, Summary{Kind: Failure}},
		{"SERVFAIL", answer{rcode: dns.RcodeServerFailure, ns: []string{soa}}, Summary{Kind: Failure}},
		{"SERVFAIL with data", answer{rcode: dns.RcodeServerFailure, an: []string{a}}, Summary{Kind: Failure}},
		{"REFUSED", answer{rcode: dns.RcodeRefused}, Summary{Kind: Failure}},
		{"YXDOMAIN", answer{rcode: dns.RcodeYXDomain, ns: []string{soa}}, Summary{Kind: Failure}},
		{"extended rcode with NOERROR below", answer{rcode: 16, edns: true, an: []string{a}}, Summary{Kind: Failure}},
		{"extended rcode with NXDOMAIN below", answer{rcode: 19, edns: true, ns: []string{soa}}, Summary{Kind: Failure}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, plain := range []bool{false, true} {
				tt.a.plain = plain
				msg := tt.a.pack(t)
				got := mustParse(t, msg).Classify(msg)
				if d := cmp.Diff(tt.want, got); d != "" {
					t.Errorf("compressed %t (-want +got):\n%s", !plain, d)
				}
				if got := plainClassify(tt.a.msg(t)); got != tt.want {
					t.Errorf("the plain implementation disagrees: %+v", got)
				}
			}
		})
	}
	t.Run("no question", func(t *testing.T) {
		msg := header(fQR|RcodeFormErr, 0, 0, 0, 0)
		if got := mustParse(t, msg).Classify(msg); got != (Summary{}) {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("class ANY", func(t *testing.T) {
		m := answer{an: []string{"www.example. 60 CH A 192.0.2.1"}}.msg(t)
		m.Question[0].Qclass = dns.ClassANY
		msg, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		if got := mustParse(t, msg).Classify(msg); got != positive(60) {
			t.Errorf("got %+v", got)
		}
	})
}

func reversed(s []string) []string {
	s = slices.Clone(s)
	slices.Reverse(s)
	return s
}

// TestClassifyOrder: the order of the records of a section has no meaning.
func TestClassifyOrder(t *testing.T) {
	a := answer{
		an: []string{
			"www.example. 60 CNAME a.example.", "a.example. 60 CNAME b.example.", "b.example. 60 CNAME c.org.",
			"c.org. 50 A 192.0.2.1", "c.org. 50 A 192.0.2.2", "x.org. 50 A 192.0.2.2", "c.org. 50 TXT x",
		},
		ns: []string{"org. 90 NS ns.org.", "org. 90 SOA a. b. 1 2 3 4 5", "example. 90 SOA a. b. 1 2 3 4 50"},
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, qtype := range []uint16{TypeA, TypeAAAA} {
		a.qtype = qtype
		msg := a.pack(t)
		want := mustParse(t, msg).Classify(msg)
		if !want.Cacheable {
			t.Fatalf("want = %+v", want)
		}
		for range 200 {
			rnd.Shuffle(len(a.an), func(i, j int) { a.an[i], a.an[j] = a.an[j], a.an[i] })
			rnd.Shuffle(len(a.ns), func(i, j int) { a.ns[i], a.ns[j] = a.ns[j], a.ns[i] })
			msg := a.pack(t)
			if got := mustParse(t, msg).Classify(msg); got != want {
				t.Fatalf("%q: %+v, want %+v", a.an, got, want)
			}
		}
	}
}

// plainClassify is Classify written again on miekg/dns messages, as plainly as
// the RFCs put it.
func plainClassify(m *dns.Msg) Summary {
	if len(m.Question) != 1 || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return Summary{Kind: Failure}
	}
	q := m.Question[0]
	owner := func(rr dns.RR) string { return strings.ToLower(rr.Header().Name) }
	class := func(rr dns.RR) bool { return q.Qclass == dns.ClassANY || rr.Header().Class == q.Qclass }
	ttlOf := func(ttl uint32) uint32 {
		if ttl>>31 == 1 {
			return 0
		}
		return ttl
	}

	end, broken := strings.ToLower(q.Name), false
	if q.Qtype != dns.TypeCNAME && q.Qtype != dns.TypeANY {
		target, cnames := map[string]string{}, 0
		for _, rr := range m.Answer {
			if c, ok := rr.(*dns.CNAME); ok && class(rr) {
				cnames++
				if _, ok := target[owner(rr)]; !ok {
					target[owner(rr)] = strings.ToLower(c.Target)
				}
			}
		}
		seen := map[string]bool{}
		for broken = cnames > maxChain; !broken && target[end] != ""; end = target[end] {
			if seen[end] {
				broken = true
				break
			}
			seen[end] = true
		}
	}

	least := uint32(1<<31 - 1)
	for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
		if rr.Header().Rrtype != dns.TypeOPT {
			least = min(least, ttlOf(rr.Header().Ttl))
		}
	}
	found := slices.ContainsFunc(m.Answer, func(rr dns.RR) bool {
		return class(rr) && owner(rr) == end && (q.Qtype == dns.TypeANY || rr.Header().Rrtype == q.Qtype)
	})
	whole := !broken && !m.Truncated
	if found && m.Rcode == dns.RcodeSuccess {
		return Summary{Kind: Positive, TTL: least, Cacheable: whole}
	}
	var soas, covering []dns.RR
	ns := false
	for _, rr := range m.Ns {
		if !class(rr) {
			continue
		}
		switch covers := dns.IsSubDomain(owner(rr), end); rr.Header().Rrtype {
		case dns.TypeSOA:
			soas = append(soas, rr)
			if covers {
				covering = append(covering, rr)
			}
		case dns.TypeNS:
			ns = ns || covers
		}
	}
	s := Summary{Kind: NoData}
	if m.Rcode == dns.RcodeNameError {
		s.Kind = NXDomain
	} else if ns && len(soas) == 0 {
		return Summary{Kind: Referral}
	}
	if len(covering) > 0 && whole && !found {
		s.TTL, s.Cacheable = min(least, ttlOf(covering[0].(*dns.SOA).Minttl)), true
	}
	return s
}
