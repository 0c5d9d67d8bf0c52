package dnswire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// wire concatenates octets (byte), 16- and 32-bit words, and raw octet strings.
func wire(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case byte:
			b = append(b, p)
		case uint16:
			b = binary.BigEndian.AppendUint16(b, p)
		case uint32:
			b = binary.BigEndian.AppendUint32(b, p)
		case string:
			b = append(b, p...)
		case []byte:
			b = append(b, p...)
		default:
			panic(fmt.Sprintf("wire: %T", p))
		}
	}
	return b
}

// header is a message header with id 0x1234.
func header(flags, qd, an, ns, ar uint16) []byte {
	return wire(uint16(0x1234), flags, qd, an, ns, ar)
}

// record is a resource record with the given owner octets.
func record(owner string, typ, class uint16, ttl uint32, rdata string) []byte {
	return wire(owner, typ, class, ttl, uint16(len(rdata)), rdata)
}

// option is an EDNS option.
func option(code uint16, value string) string {
	return string(wire(code, uint16(len(value)), value))
}

// exact copies b into an allocation of its own length, so that a read past the
// end cannot go unnoticed.
func exact(b []byte) []byte {
	c := make([]byte, len(b))
	copy(c, b)
	return c[:len(b):len(b)]
}

// wireName packs a name in presentation form, uncompressed.
func wireName(t testing.TB, name string) []byte {
	t.Helper()
	b := make([]byte, MaxNameLen+1)
	n, err := dns.PackDomainName(name, b, 0, nil, false)
	if err != nil {
		t.Fatalf("pack name %q: %v", name, err)
	}
	return exact(b[:n])
}

// foldedName is wireName in lower case.
func foldedName(t testing.TB, name string) []byte {
	t.Helper()
	return lower(wireName(t, name))
}

// lower returns a wire-form name in lower case. Its length octets are no letters.
func lower(name []byte) []byte {
	name = bytes.Clone(name)
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			name[i] = c | 0x20
		}
	}
	return name
}

// parseRRs parses records in presentation form.
func parseRRs(t testing.TB, lines []string) []dns.RR {
	t.Helper()
	var rrs []dns.RR
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			t.Fatalf("record %q: %v", l, err)
		}
		rrs = append(rrs, rr)
	}
	return rrs
}

// answer describes an answer for pack, in presentation form.
type answer struct {
	qname          string // "www.example." if empty
	qtype          uint16 // A if 0
	rcode          int
	aa, tc         bool
	plain          bool // do not compress
	an, ns, ar     []string
	edns           bool
	optFirst       bool // put OPT in front of ar
	optionsInReply []dns.EDNS0
}

// msg returns the answer as miekg/dns has it.
func (a answer) msg(t testing.TB) *dns.Msg {
	t.Helper()
	if a.qname == "" {
		a.qname = "www.example."
	}
	if a.qtype == 0 {
		a.qtype = TypeA
	}
	m := new(dns.Msg)
	m.SetQuestion(a.qname, a.qtype)
	m.Id = 0x1234
	m.Response, m.RecursionAvailable = true, true
	m.Authoritative, m.Truncated = a.aa, a.tc
	m.Rcode = a.rcode
	m.Compress = !a.plain
	m.Answer, m.Ns, m.Extra = parseRRs(t, a.an), parseRRs(t, a.ns), parseRRs(t, a.ar)
	if a.edns {
		o := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: TypeOPT}, Option: a.optionsInReply}
		o.SetUDPSize(1232)
		at := len(m.Extra)
		if a.optFirst {
			at = 0
		}
		m.Extra = slices.Insert(m.Extra, at, dns.RR(o))
	}
	return m
}

// pack packs the answer.
func (a answer) pack(t testing.TB) []byte {
	t.Helper()
	b, err := a.msg(t).Pack()
	if err != nil {
		t.Fatalf("pack: %v", err)
	}
	return exact(b)
}

// mustParse parses a good answer.
func mustParse(t testing.TB, msg []byte) *Response {
	t.Helper()
	r := new(Response)
	if err := ParseResponse(msg, r); err != nil {
		t.Fatalf("ParseResponse: %v\n%x", err, msg)
	}
	return r
}

// plainRR is a record as an independent walk over a message finds it.
type plainRR struct {
	name       string // lower case, presentation form
	typ, class uint16
	ttl        uint32
	rdata      []byte
	off, end   int
}

var errPlain = errors.New("cut short")

// plainWalk reads n records at off with nothing but miekg's name decoding.
func plainWalk(msg []byte, off, n int) ([]plainRR, error) {
	var rrs []plainRR
	for range n {
		name, end, err := dns.UnpackDomainName(msg, off)
		if err != nil {
			return nil, err
		}
		if end+10 > len(msg) {
			return nil, errPlain
		}
		f := msg[end:]
		rr := plainRR{
			name: strings.ToLower(name), off: off,
			typ: binary.BigEndian.Uint16(f), class: binary.BigEndian.Uint16(f[2:]),
			ttl: binary.BigEndian.Uint32(f[4:]),
		}
		rr.end = end + 10 + int(binary.BigEndian.Uint16(f[8:]))
		if rr.end > len(msg) {
			return nil, errPlain
		}
		rr.rdata = msg[end+10 : rr.end]
		rrs = append(rrs, rr)
		off = rr.end
	}
	return rrs, nil
}
