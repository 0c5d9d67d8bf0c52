package dnswire

import (
	"bytes"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// The fuzz targets compare with miekg/dns, which is the second opinion on what
// octets mean. Where the two differ on purpose the difference is written down at
// the place that lets it pass.

// seedQueries are queries as clients send them.
func seedQueries(t testing.TB) [][]byte {
	pack := func(f func(*dns.Msg)) []byte {
		m := new(dns.Msg).SetQuestion("wWw.Example.com.", dns.TypeA)
		m.Id = 0x1234
		f(m)
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	edns := func(options ...dns.EDNS0) []byte {
		return pack(func(m *dns.Msg) {
			m.SetEdns0(1232, true)
			m.IsEdns0().Option = options
		})
	}
	return [][]byte{
		pack(func(*dns.Msg) {}),
		pack(func(m *dns.Msg) { m.Question[0] = dns.Question{Name: ".", Qtype: dns.TypeNS, Qclass: dns.ClassINET} }),
		pack(func(m *dns.Msg) { m.Question = nil }),
		pack(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }),
		pack(func(m *dns.Msg) { m.SetNotify("example.") }),
		pack(func(m *dns.Msg) { m.SetUpdate("example.") }),
		pack(func(m *dns.Msg) { m.SetIxfr("example.", 1, "ns.example.", "host.example.") }),
		pack(func(m *dns.Msg) { m.SetTsig("key.", dns.HmacSHA256, 300, 1) }),
		pack(func(m *dns.Msg) { m.SetReply(m.Copy()) }),
		edns(),
		edns(&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"}),
		edns(&dns.EDNS0_TCP_KEEPALIVE{}, &dns.EDNS0_PADDING{Padding: []byte("xx")}),
		edns(&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}}),
		append(header(FlagRD, 1, 0, 0, 1), qA+optV1+"\x00\x00"...),
		append(header(FlagRD, 1, 0, 0, 2), qA+opt+opt...),
	}
}

// packName packs a name that miekg/dns has unpacked.
func packName(t testing.TB, name string) []byte {
	t.Helper()
	b := make([]byte, MaxNameLen+1)
	n, err := dns.PackDomainName(name, b, 0, nil, false)
	if err != nil {
		t.Fatalf("miekg/dns does not pack the name %q that it unpacked: %v", name, err)
	}
	return b[:n]
}

// checkedOptions cuts the RDATA of an OPT record down to the options whose value
// ParseQuery looks at. Others it must ignore (RFC 6891 section 6.1.2), where
// miekg/dns refuses the message if it knows the option and dislikes its value; so
// it does with a keepalive, which is to be ignored over UDP (RFC 7828 section
// 3.3.1).
func checkedOptions(rdata []byte) (kept []byte, keepalive bool) {
	for len(rdata) >= 4 {
		n := 4 + (int(rdata[2])<<8 | int(rdata[3]))
		switch code := int(rdata[0])<<8 | int(rdata[1]); {
		case code == dns.EDNS0COOKIE, code == dns.EDNS0TCPKEEPALIVE && n == 4:
			kept = append(kept, rdata[:n]...)
			keepalive = keepalive || code == dns.EDNS0TCPKEEPALIVE
		}
		rdata = rdata[n:]
	}
	return kept, keepalive
}

func FuzzParseQuery(f *testing.F) {
	for _, msg := range seedQueries(f) {
		f.Add(msg)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		msg := exact(data)
		var q Query
		v := ParseQuery(msg, &q)
		if !bytes.Equal(msg, data) {
			t.Fatal("the message was changed")
		}
		checkErrorAnswer(t, msg, &q, v)
		if v == Accept {
			checkQuery(t, msg, &q)
		}
		checkRepackedQuery(t, msg)
	})
}

// checkQuery checks an accepted query against miekg/dns.
func checkQuery(t *testing.T, msg []byte, q *Query) {
	t.Helper()
	_, _, _, ar := Counts(msg)
	rrs, err := plainWalk(msg, q.QuestionEnd(), int(ar))
	if err != nil {
		t.Fatalf("accepted, but its records: %v", err)
	}
	// What miekg/dns decodes: the message without the parts that ParseQuery
	// does not look at, which are additional records other than OPT and the
	// options that it ignores.
	known := exact(msg[:q.QuestionEnd()])
	opts, keepalive := uint16(0), false
	for _, rr := range rrs {
		if rr.typ == TypeOPT {
			var options []byte
			options, keepalive = checkedOptions(rr.rdata)
			known = append(known, record("\x00", rr.typ, rr.class, rr.ttl, string(options))...)
			opts++
		}
	}
	SetCounts(known, 1, 0, 0, opts)
	for _, b := range [][]byte{known, msg} {
		m := new(dns.Msg)
		if err := m.Unpack(b); err != nil {
			if len(b) == len(known) {
				t.Fatalf("accepted, but miekg/dns: %v", err)
			}
			continue
		}
		if m.Id != q.ID || m.Response || m.Opcode != 0 || m.RecursionDesired != q.RD() ||
			m.AuthenticatedData != q.AD() || m.CheckingDisabled != q.CD() {
			t.Fatalf("header: %+v, miekg/dns: %+v", q, m.MsgHdr)
		}
		if len(m.Question) != 1 || m.Question[0].Qtype != q.Type || m.Question[0].Qclass != q.Class ||
			!bytes.Equal(packName(t, m.Question[0].Name), q.Name(msg)) {
			t.Fatalf("question: %+v, miekg/dns: %v", q, m.Question)
		}
		o := m.IsEdns0()
		if o == nil {
			if q.EDNS || q.DO || q.Keepalive || q.UDPSize != 512 {
				t.Fatalf("OPT: %+v, miekg/dns: none", q)
			}
			continue
		}
		if !q.EDNS || o.Do() != q.DO || o.Version() != q.Version || max(512, o.UDPSize()) != q.UDPSize || keepalive != q.Keepalive {
			t.Fatalf("OPT: %+v, miekg/dns: %v", q, o)
		}
	}
}

// checkRepackedQuery checks that a query which miekg/dns reads and writes again is
// accepted, if it is one that RFCs let us answer.
func checkRepackedQuery(t *testing.T, data []byte) {
	t.Helper()
	m := new(dns.Msg)
	if m.Unpack(data) != nil || m.Response || m.Opcode != 0 || len(m.Question) != 1 || len(m.Answer)+len(m.Ns) > 0 ||
		m.Question[0].Qtype == dns.TypeOPT {
		return
	}
	for _, rr := range m.Extra {
		o, ok := rr.(*dns.OPT)
		if !ok {
			continue
		}
		if o != m.IsEdns0() || o.Hdr.Name != "." {
			return // two of them, or misplaced
		}
		for _, opt := range o.Option {
			if c, ok := opt.(*dns.EDNS0_COOKIE); ok && len(c.Cookie) != 16 && (len(c.Cookie) < 32 || len(c.Cookie) > 80) {
				return
			}
		}
	}
	for _, m.Compress = range []bool{false, true} {
		b, err := m.Pack()
		if err != nil {
			return
		}
		want := Accept
		if o := m.IsEdns0(); o != nil && o.Version() != 0 {
			want = BadVers
		}
		if got := ParseQuery(exact(b), new(Query)); got != want {
			t.Fatalf("verdict %d for what miekg/dns packs: %x", got, b)
		}
	}
}

// priorNames walks the name at off by the letter of RFC 1035 section 4.1.4: every
// pointer leads to labels that lie wholly before those in which it stands, and not
// in the header. miekg/dns lets them lead anywhere.
func priorNames(msg []byte, off int) bool {
	start := off
	for off < len(msg) && msg[off] > 0 && msg[off] < 0x40 {
		off += 1 + int(msg[off])
	}
	switch {
	case off >= len(msg):
		return false
	case msg[off] == 0:
		return true
	case off+1 >= len(msg):
		return false
	}
	to := int(msg[off]&0x3f)<<8 | int(msg[off+1])
	return to >= HeaderLen && to < start && priorNames(msg[:start], to)
}

func FuzzName(f *testing.F) {
	for _, name := range []string{".", "a.", "wWw.eXample.", `\000\.\255.x.`, strings.Repeat("a.", 127)} {
		f.Add(append(make([]byte, HeaderLen), wireName(f, name)...), uint16(12), uint16(13))
	}
	chain, off := pointerChain(127)
	f.Add(chain, uint16(off), uint16(off-2))
	for _, msg := range seedAnswers(f) {
		f.Add(msg, uint16(12), uint16(29))
	}
	f.Fuzz(func(t *testing.T, data []byte, a, b uint16) {
		msg := exact(data)
		nameA, okA := checkName(t, msg, int(a))
		nameB, okB := checkName(t, msg, int(b))
		if !okA || !okB {
			NameEqual(msg, min(int(a), len(msg)), min(int(b), len(msg))) // ends, and does not panic
			return
		}
		wireA, wireB := packName(t, nameA), packName(t, nameB)
		foldedA, foldedB := AppendFolded(nil, wireA), AppendFolded(nil, wireB)
		same := strings.EqualFold(nameA, nameB) // presentation form is all ASCII
		for what, got := range map[string]bool{
			"NameEqual": NameEqual(msg, int(a), int(b)), "NameEqual, swapped": NameEqual(msg, int(b), int(a)),
			"EqualFold": EqualFold(wireA, wireB), "AppendFolded": bytes.Equal(foldedA, foldedB),
		} {
			if got != same {
				t.Errorf("%s(%q, %q) = %t", what, nameA, nameB, got)
			}
		}
		if got, want := IsSubdomain(foldedA, foldedB), dns.IsSubDomain(strings.ToLower(nameB), strings.ToLower(nameA)); got != want {
			t.Errorf("IsSubdomain(%q, %q) = %t", nameA, nameB, got)
		}
		if got, want := LabelCount(wireA), dns.CountLabel(nameA); got != want {
			t.Errorf("LabelCount(%q) = %d, want %d", nameA, got, want)
		}
	})
}

// checkName checks what we make of the name at off against miekg/dns.
func checkName(t *testing.T, msg []byte, off int) (name string, ok bool) {
	t.Helper()
	name, miekgEnd, miekgErr := dns.UnpackDomainName(msg, off)
	end, err := nameEnd(msg, off)
	AppendName(nil, msg, off) // ends, and does not panic
	if n, plainErr := plainNameLen(msg, off); plainErr == nil && (err != nil || end != off+n) {
		t.Fatalf("plainNameLen at %d = %d, nameEnd = %d, %v", off, n, end, err)
	}
	if err != nil {
		if miekgErr == nil && priorNames(msg, off) {
			t.Fatalf("name at %d of %x: refused, miekg/dns: %q", off, msg, name)
		}
		return "", false
	}
	if miekgErr != nil || miekgEnd != end || !priorNames(msg, off) {
		t.Fatalf("name at %d of %x: end %d, miekg/dns: %q, %d, %v", off, msg, end, name, miekgEnd, miekgErr)
	}
	want := lower(packName(t, name))
	if got := AppendName([]byte("head"), msg, off); string(got) != "head"+string(want) {
		t.Fatalf("name at %d of %x: %q, miekg/dns: %q", off, msg, got, name)
	}
	return name, true
}
