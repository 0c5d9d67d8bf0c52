package resolver

import (
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestNoAAAA: outside the cluster zone, no name has IPv6 addresses, no name is
// denied for that, and nobody is asked.
func TestNoAAAA(t *testing.T) {
	cluster, err := search.WireName("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	z := zone{"www.example.com.": "A AAAA", "web.shop.svc.cluster.local.": "A AAAA"}
	tests := map[string]struct {
		name   string
		qtype  uint16
		do     bool
		rcode  int
		answer int
		asked  int
	}{
		"outside":              {name: "www.example.com.", qtype: dns.TypeAAAA},
		"outside, nonexistent": {name: "nowhere.example.", qtype: dns.TypeAAAA},
		"its A":                {name: "www.example.com.", qtype: dns.TypeA, answer: 1, asked: 1},
		"in the cluster":       {name: "web.shop.svc.cluster.local.", qtype: dns.TypeAAAA, answer: 1, asked: 1},
		"a validating client":  {name: "www.example.com.", qtype: dns.TypeAAAA, do: true, answer: 1, asked: 1},
		"at the end of a walk": {name: "www.example.com.shop.svc.cluster.local.", qtype: dns.TypeAAAA, answer: 1, asked: 5},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: z.answer(t)}
				r := newTestResolver(t, f, withSearch(t), func(s *Settings) { s.AAAAZone = cluster })
				defer end(t, r)
				c := newClient(t, r, "10.0.0.1", UDP)
				for range 2 {
					m := query(tt.name, tt.qtype)
					m.IsEdns0().SetDo(tt.do)
					c.ask(m)
					a := <-c.answers
					if a.Rcode != tt.rcode || len(a.Answer) != tt.answer {
						t.Errorf("got %v", a)
					}
					for _, rr := range a.Answer {
						if rr.Header().Rrtype == dns.TypeAAAA && tt.asked == 5 {
							t.Errorf("an IPv6 address at the end of a walk: %v", rr)
						}
					}
					if tt.answer == 0 && (len(a.Ns) != 1 || a.Ns[0].Header().Rrtype != dns.TypeSOA || a.Ns[0].Header().Ttl != 300) {
						t.Errorf("authority %v, want an SOA record", a.Ns)
					}
				}
				if n := f.total(); n != tt.asked {
					t.Errorf("%d questions upstream, want %d", n, tt.asked)
				}
			})
		})
	}
}
