package cache

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strings"

	"github.com/miekg/dns"
)

// generator makes answers out of a fuzzer's octets, of every shape that the
// cache has a rule for. When the octets run out, a random source seeded with
// them goes on.
type generator struct {
	data []byte
	rand *rand.Rand
}

func newGenerator(data []byte) *generator {
	seed := uint64(len(data))
	for _, b := range data {
		seed = seed*31 + uint64(b)
	}
	return &generator{data: data, rand: rand.New(rand.NewPCG(seed, 1))}
}

// n returns a number below limit, which is at most 256.
func (g *generator) n(limit int) int {
	if len(g.data) == 0 {
		return g.rand.IntN(limit)
	}
	b := g.data[0]
	g.data = g.data[1:]
	return int(b) % limit
}

func (g *generator) chance(percent int) bool { return g.n(100) < percent }

func pick[T any](g *generator, of ...T) T { return of[g.n(len(of))] }

// name returns a name of up to four labels, some of them odd.
func (g *generator) name() string {
	var b strings.Builder
	for range g.n(5) {
		b.WriteString(pick(g, "www", "a", "Example", "com", "cluster", "local", `\000\255`, `x\.y`, "*", "_dns", "k8s-APP", strings.Repeat("z", 60)))
		b.WriteByte('.')
	}
	if b.Len() == 0 {
		return "."
	}
	return b.String()
}

// recase changes the case of some of the name's letters.
func (g *generator) recase(name string) string {
	b := []byte(name)
	for i, c := range b {
		if (c|0x20) >= 'a' && (c|0x20) <= 'z' && g.chance(50) {
			b[i] ^= 0x20
		}
	}
	return string(b)
}

// owner returns a name for a record: often the qname or one near it.
func (g *generator) owner(qname string) string {
	switch g.n(8) {
	case 0, 1, 2:
		return qname
	case 3:
		return g.recase(qname)
	case 4:
		return "sub." + strings.TrimPrefix(qname, ".")
	case 5:
		if _, parent, ok := strings.Cut(qname, "."); ok && parent != "" && !strings.Contains(qname, `\`) {
			return parent
		}
		return "."
	case 6:
		return "target.example.net."
	default:
		return g.name()
	}
}

// record returns a record at name.
func (g *generator) record(name, qname string, typ uint16) dns.RR {
	ttl := pick[uint32](g, 0, 1, 5, 29, 300, 300, 300, 3600, 86400, 1<<31-1, 1<<31, 1<<32-1)
	h := dns.RR_Header{Name: name, Rrtype: typ, Class: dns.ClassINET, Ttl: ttl}
	switch typ {
	case dns.TypeA:
		return &dns.A{Hdr: h, A: net.IPv4(192, 0, 2, byte(g.n(256)))}
	case dns.TypeAAAA:
		return &dns.AAAA{Hdr: h, AAAA: net.IP{0x20, 1, 0xd, 0xb8, 15: byte(g.n(256))}}
	case dns.TypeCNAME:
		return &dns.CNAME{Hdr: h, Target: g.owner(qname)}
	case dns.TypeDNAME:
		return &dns.DNAME{Hdr: h, Target: g.owner(qname)}
	case dns.TypeNS:
		return &dns.NS{Hdr: h, Ns: g.owner(qname)}
	case dns.TypePTR:
		return &dns.PTR{Hdr: h, Ptr: g.owner(qname)}
	case dns.TypeMX:
		return &dns.MX{Hdr: h, Preference: uint16(g.n(256)), Mx: g.owner(qname)}
	case dns.TypeSRV:
		return &dns.SRV{Hdr: h, Port: uint16(g.n(256)), Target: g.owner(qname)}
	case dns.TypeSOA:
		return &dns.SOA{Hdr: h, Ns: g.owner(qname), Mbox: g.name(), Serial: 1, Minttl: pick[uint32](g, 0, 1, 60, 300, 86400)}
	case dns.TypeRRSIG:
		return &dns.RRSIG{Hdr: h, TypeCovered: pick[uint16](g, dns.TypeA, dns.TypeSOA), SignerName: g.owner(qname), Signature: "AAAA"}
	case dns.TypeHTTPS:
		return &dns.HTTPS{SVCB: dns.SVCB{Hdr: h, Priority: 1, Target: g.owner(qname)}}
	case dns.TypeNAPTR:
		return &dns.NAPTR{Hdr: h, Flags: "u", Service: "s", Regexp: "r", Replacement: g.owner(qname)}
	default:
		h.Rrtype = dns.TypeTXT
		return &dns.TXT{Hdr: h, Txt: []string{fmt.Sprint("TeXt", g.n(256)), strings.Repeat("t", g.n(256))}}
	}
}

var generated = []uint16{
	dns.TypeA, dns.TypeA, dns.TypeAAAA, dns.TypeCNAME, dns.TypeNS, dns.TypePTR, dns.TypeMX, dns.TypeSRV,
	dns.TypeSOA, dns.TypeRRSIG, dns.TypeHTTPS, dns.TypeNAPTR, dns.TypeTXT, dns.TypeDNAME,
}

// answer returns an answer, complete with OPT if it is to have one.
func (g *generator) answer() *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(g.name(), pick(g, generated...))
	q := m.Question[0]
	m.Response = true
	m.Authoritative, m.AuthenticatedData = g.chance(50), g.chance(50)
	m.RecursionAvailable, m.CheckingDisabled, m.Zero = g.chance(50), g.chance(50), g.chance(10)
	m.Compress = g.chance(70)
	if g.chance(25) {
		m.Rcode = dns.RcodeNameError
	}
	if g.chance(60) {
		for range 1 + g.n(5) {
			m.Answer = append(m.Answer, g.record(q.Name, q.Name, q.Qtype))
		}
	}
	most := pick(g, 0, 2, 6, 6, 120)
	for _, section := range []*[]dns.RR{&m.Answer, &m.Ns, &m.Extra} {
		for range g.n(most + 1) {
			*section = append(*section, g.record(g.owner(q.Name), q.Name, pick(g, generated...)))
		}
	}
	if g.chance(40) {
		m.Ns = append(m.Ns, g.record(".", q.Name, dns.TypeSOA))
	}
	if g.chance(50) {
		opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: 1232}}
		if g.chance(50) {
			opt.SetDo()
		}
		at := g.n(len(m.Extra) + 1)
		m.Extra = append(m.Extra[:at:at], append([]dns.RR{opt}, m.Extra[at:]...)...)
	}
	return m
}

// query returns a client's query for the question of m, and its octets.
func (g *generator) query(m *dns.Msg) *dns.Msg {
	q := new(dns.Msg)
	q.SetQuestion(g.recase(m.Question[0].Name), m.Question[0].Qtype)
	q.RecursionDesired, q.AuthenticatedData, q.CheckingDisabled = g.chance(80), g.chance(30), g.chance(30)
	if g.chance(60) {
		q.SetEdns0(uint16(pick(g, 0, 512, 1232, 4096)), g.chance(50))
	}
	return q
}
