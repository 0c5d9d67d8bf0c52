package lab

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// lines renders records with single blanks.
func lines(records []dns.RR) []string {
	var out []string
	for _, rr := range records {
		out = append(out, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	return out
}

func TestZoneAnswer(t *testing.T) {
	const denial = "cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"
	cases := []struct {
		name   string
		zone   *Zone
		qname  string
		qtype  uint16
		rcode  int
		answer []string
		ns     []string
	}{
		{"A", ClusterZone(), "echo.default.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, []string{"echo.default.svc.cluster.local. 30 IN A 10.96.7.1"}, nil},
		{"case does not matter", ClusterZone(), "Echo.Default.SVC.Cluster.Local.", dns.TypeA, dns.RcodeSuccess, []string{"echo.default.svc.cluster.local. 30 IN A 10.96.7.1"}, nil},
		{"several", ClusterZone(), "many.prod.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, []string{
			"many.prod.svc.cluster.local. 30 IN A 10.244.9.1",
			"many.prod.svc.cluster.local. 30 IN A 10.244.9.2",
			"many.prod.svc.cluster.local. 30 IN A 10.244.9.3",
		}, nil},
		{"NODATA", ClusterZone(), "payments.prod.svc.cluster.local.", dns.TypeAAAA, dns.RcodeSuccess, nil, []string{denial}},
		{"NODATA at an empty non-terminal", ClusterZone(), "prod.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, nil, []string{denial}},
		{"NXDOMAIN", ClusterZone(), "nobody.prod.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, nil, []string{denial}},
		{"NXDOMAIN below a name", ClusterZone(), "www.example.com.prod.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, nil, []string{denial}},
		{"wildcard", ClusterZone(), "Any.uncached.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, []string{"Any.uncached.svc.cluster.local. 0 IN A 10.96.7.4"}, nil},
		{"wildcard, deep", ClusterZone(), "a.b.uncached.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, []string{"a.b.uncached.svc.cluster.local. 0 IN A 10.96.7.4"}, nil},
		{"wildcard, NODATA", ClusterZone(), "any.uncached.svc.cluster.local.", dns.TypeAAAA, dns.RcodeSuccess, nil, []string{denial}},
		{"CNAME out of the zone", ClusterZone(), "external.prod.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, []string{"external.prod.svc.cluster.local. 30 IN CNAME www.example.com."}, nil},
		{"CNAME inside the zone", ExternalZone(), "www.example.com.", dns.TypeA, dns.RcodeSuccess, []string{
			"www.example.com. 300 IN CNAME example.com.",
			"example.com. 300 IN A 192.0.2.1",
		}, nil},
		{"CNAME asked for", ExternalZone(), "www.example.com.", dns.TypeCNAME, dns.RcodeSuccess, []string{"www.example.com. 300 IN CNAME example.com."}, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var m dns.Msg
			c.zone.answer(&m, dns.Question{Name: c.qname, Qtype: c.qtype, Qclass: dns.ClassINET})
			if m.Rcode != c.rcode {
				t.Errorf("rcode %s, want %s", dns.RcodeToString[m.Rcode], dns.RcodeToString[c.rcode])
			}
			if diff := cmp.Diff(c.answer, lines(m.Answer)); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.ns, lines(m.Ns)); diff != "" {
				t.Errorf("authority (-want +got):\n%s", diff)
			}
		})
	}
}

// A chain that leads in a circle ends.
func TestZoneLoop(t *testing.T) {
	z, err := ParseZone("example.org", "@ 60 SOA ns h 1 2 3 4 5\na 60 CNAME b\nb 60 CNAME a\n")
	if err != nil {
		t.Fatal(err)
	}
	var m dns.Msg
	z.answer(&m, dns.Question{Name: "a.example.org.", Qtype: dns.TypeA, Qclass: dns.ClassINET})
	if len(m.Answer) != maxAlias || len(m.Ns) != 1 {
		t.Errorf("%d answers, %d in authority", len(m.Answer), len(m.Ns))
	}
}

func TestParseZoneErrors(t *testing.T) {
	for name, text := range map[string]string{
		"no SOA":       "a 60 A 192.0.2.1\n",
		"outside":      "@ 60 SOA ns h 1 2 3 4 5\na.example.net. 60 A 192.0.2.1\n",
		"not a record": "@ 60 SOA ns h 1 2 3 4 5\na 60 A somewhere\n",
	} {
		if _, err := ParseZone("example.org.", text); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
