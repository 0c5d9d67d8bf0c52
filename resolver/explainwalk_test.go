package resolver

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestExplainWalked: what is said to be finished for the client is what the
// pipeline finishes: the answer that is shown leads past the first name, or fails
// like the name that stopped the walk.
func TestExplainWalked(t *testing.T) {
	const gone = "NXDOMAIN"
	long := strings.Repeat("x", 60) + "." + strings.Repeat("y", 60) + "." + strings.Repeat("z", 40)
	longDomain := func(s *Search) {
		s.Client = func(netip.Addr) (*search.List, bool) {
			return s.Policy.ListOf(search.Pod{Namespace: "shop", Searches: []string{strings.Repeat("d.", 60) + "example", "corp.example"}}), true
		}
	}
	tests := map[string]struct {
		zone   zone
		change func(*Search)
		noAAAA bool
		ask    string
		qtype  string
		answer string // rcode and target
		walked bool
		ends   string // at, and how
	}{
		"the last":              {zone: zone{"a.b.": "A"}, answer: "NOERROR a.b.", walked: true, ends: "a.b. the look-up ends here"},
		"left, with no address": {zone: zone{"a.b.svc.cluster.local.": "nothing", "a.b.": "A"}, answer: gone, ends: "a.b. the look-up ends here"},
		"no addresses at all":   {zone: zone{"a.b.": "nothing"}, answer: gone, ends: "a.b. glibc goes on, musl ends here"},
		"turned off":            {zone: zone{"a.b.": "A"}, change: func(s *Search) { s.Collapse = false }, answer: gone, ends: "a.b. the look-up ends here"},
		"a type that is walked by nobody": {
			zone: zone{"a.b.": "MX"}, qtype: "NS", answer: gone, ends: "a.b. glibc goes on, musl ends here",
		},
		"AAAA by policy":    {zone: zone{"a.b.": "A"}, noAAAA: true, qtype: "AAAA", answer: "NOERROR a.b.", walked: true, ends: "a.b. the look-up ends here"},
		"expanded":          {zone: zone{"a.b.svc.cluster.local.": "A"}, ask: "a.b.", change: expandShop, answer: "NOERROR a.b.svc.cluster.local.", walked: true, ends: "a.b.svc.cluster.local. the look-up ends here"},
		"expanded, for not": {zone: zone{"a.b.": "A"}, ask: "a.b.", change: expandShop, answer: "NOERROR", ends: "a.b. the look-up ends here"},
		"whole":             {zone: zone{"a.b.svc.cluster.local.": "A"}, ask: "a.b.", answer: gone, ends: "a.b. not here"},
		"of ndots dots, searched as it is first": {
			zone: zone{"a.b.": "A"}, ask: "a.b.shop.svc.cluster.local", answer: "NOERROR a.b.", walked: true, ends: "a.b. the look-up ends here",
		},
		"behind a name that is too long": {zone: zone{long + ".corp.example.": "A"}, change: longDomain, ask: long, answer: gone, ends: long + ".corp.example. the look-up ends here"},
		"but the last":                   {zone: zone{long + ".": "A"}, change: longDomain, ask: long, answer: "NOERROR " + long + ".", walked: true, ends: long + ". the look-up ends here"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: tt.zone.answer(t)}, withSearch(t, func(s *Search) {
					s.Client = func(netip.Addr) (*search.List, bool) {
						return s.Policy.ListOf(search.Pod{Namespace: "shop"}), true
					}
					if tt.change != nil {
						tt.change(s)
					}
				}), func(s *Settings) {
					if tt.noAAAA {
						s.AAAAZone = []byte("\x07cluster\x05local\x00")
					}
				})
				defer end(t, r)
				if tt.ask == "" {
					tt.ask = "a.b"
				}
				if tt.qtype == "" {
					tt.qtype = "A"
				}
				x, err := r.Explain(t.Context(), tt.ask, tt.qtype, netip.MustParseAddr("10.0.0.1"), "")
				if err != nil {
					t.Fatal(err)
				}
				answer := x.Rcode
				for _, rr := range x.Answer {
					if f := strings.Fields(rr); f[3] == "CNAME" {
						answer += " " + f[4]
					}
				}
				last := x.Steps[len(x.Steps)-1]
				if got := last.Name + " " + last.Step; answer != tt.answer || x.Walked != tt.walked || got != tt.ends {
					t.Errorf("answer %q, walked %v, ends %q\nwant   %q, walked %v, ends %q", answer, x.Walked, got, tt.answer, tt.walked, tt.ends)
				}
			})
		})
	}
}

// TestExplainTypes: what the pipeline answers by itself is not asked upstream for
// an explanation either.
func TestExplainTypes(t *testing.T) {
	f := &fakeForwarder{answer: addressOf(t, 60)}
	r := newTestResolver(t, f, withSearch(t))
	for _, qtype := range []string{"ANY", "axfr", "IXFR", "OPT", "TSIG", "TKEY", "MAILA", "MAILB"} {
		if _, err := r.Explain(t.Context(), "a.example", qtype, netip.Addr{}, "shop"); err == nil {
			t.Errorf("%s: no error", qtype)
		}
	}
	if f.total() != 0 {
		t.Errorf("asked upstream: %v", f.asked)
	}
}
