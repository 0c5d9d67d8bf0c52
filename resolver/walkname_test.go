package resolver

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestWalkSkipsWhatIsNoName: a name that would be longer than 253 characters is
// skipped. glibc then goes right to the last name (res_search ends the list at a
// name that it cannot pack), musl and Go to the next: where that makes a
// difference, the walk is the client's.
func TestWalkSkipsWhatIsNoName(t *testing.T) {
	base := strings.Repeat("x", 63) + "." + strings.Repeat("y", 63) + "." + strings.Repeat("z", 63)
	long := strings.Repeat("d", 60) + ".example"
	first := base + ".shop.svc.cluster.local."
	for name, tt := range map[string]struct {
		zone zone
		want string
	}{
		"the last is there": {zone{base + ".": "A"}, "NOERROR | " + first + " CNAME " + base + ". | " + base + ". A 192.0.2.1"},
		"nothing is":        {zone{}, "NXDOMAIN"},
		"one before it is":  {zone{base + ".cluster.local.": "A", base + ".": "A"}, "NOERROR | " + first + " CNAME " + base + ".cluster.local. | " + base + ".cluster.local. A 192.0.2.1"},
		"one behind it is":  {zone{base + ".last.example.": "A", base + ".": "A"}, "NXDOMAIN"},
		"one behind fails":  {zone{base + ".last.example.": "fails", base + ".": "A"}, "NXDOMAIN"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: tt.zone.answer(t)}
				r := newTestResolver(t, f, withSearch(t, func(s *Search) {
					p, err := search.New(search.Config{ClusterDomain: "cluster.local", NDots: 5})
					if err != nil {
						t.Fatal(err)
					}
					s.Policy = p
					s.Client = func(netip.Addr) (*search.List, bool) {
						return p.ListOf(search.Pod{Namespace: "shop", Searches: []string{long, "last.example"}}), true
					}
				}))
				defer end(t, r)
				c := newClient(t, r, "10.0.0.1", UDP)
				for range 2 {
					if got := short(c.lookup(first)); got != tt.want {
						t.Errorf("got  %s\nwant %s", got, tt.want)
					}
				}
				for question := range f.asked {
					if n := len(strings.Fields(question)[0]); n > 254 {
						t.Errorf("asked for a name of %d characters", n)
					}
				}
				if n := f.count(dns.Fqdn(base+"."+long) + " A"); n != 0 {
					t.Error("asked for what is no name")
				}
			})
		})
	}
}
