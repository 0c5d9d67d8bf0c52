package lab

import (
	"fmt"
	"strings"

	"github.com/miekg/dns"
)

// maxAlias bounds a CNAME chain.
const maxAlias = 10

// Zone is a table of records under one origin. It is immutable.
type Zone struct {
	origin string
	soa    *dns.SOA
	names  map[string][]dns.RR // by folded owner; an empty non-terminal has no records
}

// ParseZone reads a zone from master-file text (RFC 1035 section 5) that must
// hold the origin's SOA. An owner "*.name" synthesises answers for every name
// directly or indirectly below name that the zone does not have (RFC 4592).
func ParseZone(origin, text string) (*Zone, error) {
	z := &Zone{origin: dns.CanonicalName(origin), names: make(map[string][]dns.RR)}
	parser := dns.NewZoneParser(strings.NewReader(text), z.origin, "")
	for rr, ok := parser.Next(); ok; rr, ok = parser.Next() {
		owner := dns.CanonicalName(rr.Header().Name)
		if !dns.IsSubDomain(z.origin, owner) {
			return nil, fmt.Errorf("zone %s: %s is outside", z.origin, owner)
		}
		if soa, ok := rr.(*dns.SOA); ok {
			z.soa = soa
		}
		z.names[owner] = append(z.names[owner], rr)
		for parent := owner; parent != z.origin; {
			parent = parentOf(parent)
			z.names[parent] = append([]dns.RR(nil), z.names[parent]...) // exists, maybe without records
		}
	}
	if err := parser.Err(); err != nil {
		return nil, fmt.Errorf("zone %s: %w", z.origin, err)
	}
	if z.soa == nil {
		return nil, fmt.Errorf("zone %s: no SOA record", z.origin)
	}
	return z, nil
}

// parentOf cuts the first label off; the root is its own parent.
func parentOf(name string) string {
	if next, end := dns.NextLabel(name, 0); !end {
		return name[next:]
	}
	return "."
}

// find returns the records of a name, synthesised from a wildcard if need be.
func (z *Zone) find(name string) (records []dns.RR, exists bool) {
	folded := dns.CanonicalName(name)
	if records, exists = z.names[folded]; exists {
		return records, true
	}
	for parent := folded; parent != z.origin; {
		parent = parentOf(parent)
		if wild, ok := z.names["*."+parent]; ok {
			for _, rr := range wild {
				rr = dns.Copy(rr)
				rr.Header().Name = name
				records = append(records, rr)
			}
			return records, true
		}
		if _, ok := z.names[parent]; ok { // the closest encloser, without a wildcard
			return nil, false
		}
	}
	return nil, false
}

// answer fills the reply's sections and response code for one question.
func (z *Zone) answer(m *dns.Msg, q dns.Question) {
	name := q.Name
	for range maxAlias {
		records, exists := z.find(name)
		if !exists {
			m.Rcode = dns.RcodeNameError
			break
		}
		var alias *dns.CNAME
		found := false
		for _, rr := range records {
			switch rr.Header().Rrtype {
			case q.Qtype:
				m.Answer, found = append(m.Answer, rr), true
			case dns.TypeCNAME:
				alias = rr.(*dns.CNAME)
			}
		}
		if found {
			return
		}
		if alias == nil {
			break // NODATA
		}
		m.Answer = append(m.Answer, alias)
		if name = alias.Target; !dns.IsSubDomain(z.origin, dns.CanonicalName(name)) {
			return // the asker follows it
		}
	}
	m.Ns = append(m.Ns, z.denial())
}

// denial is the SOA of a negative answer; its TTL is the lesser of the
// record's own and MINIMUM, RFC 2308 section 3.
func (z *Zone) denial() dns.RR {
	soa := *z.soa
	soa.Hdr.Ttl = min(soa.Hdr.Ttl, soa.Minttl)
	return &soa
}

// ClusterZone is the zone cluster.local of the laboratory's Services, with the
// TTLs of a stock CoreDNS (30 s, denials 5 s). Every name below
// uncached.svc.cluster.local exists, with TTL 0.
func ClusterZone() *Zone {
	return mustZone("cluster.local.", `
$TTL 30
@                      SOA  ns.dns hostmaster 1 7200 1800 86400 5
ns.dns                 A    10.96.0.10
kubernetes.default.svc A    10.96.0.1
kube-dns.kube-system.svc           A    10.96.0.10
kube-dns.kube-system.svc           AAAA fd00:10:96::a
_dns._udp.kube-dns.kube-system.svc SRV  0 100 53 kube-dns.kube-system.svc
echo.default.svc       A    10.96.7.1
echo.default.svc       AAAA fd00:10:96::7:1
payments.prod.svc      A    10.96.7.2
web.prod.svc           A    10.96.7.3
many.prod.svc          A    10.244.9.1
many.prod.svc          A    10.244.9.2
many.prod.svc          A    10.244.9.3
external.prod.svc      CNAME www.example.com.
*.uncached.svc         0 A  10.96.7.4
`)
}

// ExternalZone is the zone example.com: what stands for the world outside the
// cluster. text.example.com does not fit into one UDP answer; every name below
// uncached.example.com exists, with TTL 0.
func ExternalZone() *Zone {
	long := strings.Repeat("\""+strings.Repeat("x", 250)+"\" ", 20)
	return mustZone("example.com.", `
$TTL 300
@          SOA  ns hostmaster 1 7200 1800 86400 60
@          A    192.0.2.1
@          AAAA 2001:db8::1
ns         A    192.0.2.53
www        CNAME @
api        A    192.0.2.2
v4only     A    192.0.2.3
soon       2 A  192.0.2.4
*.uncached 0 A  192.0.2.5
text       TXT  `+long+`
`)
}

// mustZone parses a zone of this file; the package's tests parse each.
func mustZone(origin, text string) *Zone {
	z, err := ParseZone(origin, text)
	if err != nil {
		panic(err)
	}
	return z
}
