package dnswire

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// The parts that the tables below put queries together from.
const (
	qWWW    = "\x03wWw\x07eXample\x00"   // 13 octets
	qA      = qWWW + "\x00\x01\x00\x01"  // A IN
	optZero = "\x00\x00\x29\x04\xd0\x00" // root, OPT, 1232, upper rcode
	optV0   = optZero + "\x00\x00\x00"   // version 0, no flags; RDLENGTH follows
	optDO   = optZero + "\x00\x80\x00"   // version 0, DO
	optV1   = optZero + "\x01\x80\x00"   // version 1, DO
	opt     = optV0 + "\x00\x00"         // a whole OPT record
	rrA     = "\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x7f\x00\x00\x01"
	rrTSIG  = "\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x02\xff\xff" // RDATA is nonsense
	rrSIG0  = "\x00\x00\x18\x00\xff\x00\x00\x00\x00\x00\x01\xff"
)

// withOptions is an OPT record of version 0 with the options.
func withOptions(options ...string) string {
	data := strings.Join(options, "")
	return string(wire(optV0, uint16(len(data)), data))
}

func TestParseQuery(t *testing.T) {
	query := func(ar uint16, parts ...any) []byte {
		return append(header(FlagRD, 1, 0, 0, ar), wire(parts...)...)
	}
	// What q holds with a readable question and without EDNS.
	base := Query{ID: 0x1234, Flags: FlagRD, Type: TypeA, Class: ClassIN, NameLen: len(qWWW), UDPSize: 512}
	with := func(f func(*Query)) Query {
		q := base
		f(&q)
		return q
	}
	edns := with(func(q *Query) { q.EDNS, q.UDPSize = true, 1232 })
	noQuestion := Query{ID: 0x1234, Flags: FlagRD, UDPSize: 512}
	flags := func(f uint16) Query { return Query{ID: 0x1234, Flags: f, UDPSize: 512} }

	type test struct {
		name string
		msg  []byte
		want Verdict
		q    Query
	}
	tests := []test{
		{"plain", query(0, qA), Accept, base},
		{"root", query(0, "\x00\x00\x02\x00\x01"), Accept, with(func(q *Query) { q.NameLen, q.Type = 1, TypeNS })},
		{
			"flags as sent",
			append(header(FlagAA|FlagTC|FlagRD|FlagRA|1<<6|FlagAD|FlagCD|9, 1, 0, 0, 0), qA...), Accept,
			with(func(q *Query) { q.Flags = FlagAA | FlagTC | FlagRD | FlagRA | 1<<6 | FlagAD | FlagCD | 9 }),
		},
		{"class CH", query(0, qWWW, TypeTXT, uint16(3)), Accept, with(func(q *Query) { q.Type, q.Class = TypeTXT, 3 })},
		{"trailing octets", query(0, qA, "trailing"), Accept, base},
		{"trailing OPT that is not counted", query(0, qA, opt), Accept, base},

		// Header.
		{"empty", nil, Drop, Query{UDPSize: 512}},
		{"11 octets", header(FlagRD, 0, 0, 0, 0)[:11], Drop, Query{UDPSize: 512}},
		{"an answer", append(header(FlagQR|FlagRD, 1, 0, 0, 0), qA...), Drop, flags(FlagQR | FlagRD)},
		{"an answer to NOTIFY", append(header(FlagQR|4<<11, 1, 0, 0, 0), qA...), Drop, flags(FlagQR | 4<<11)},
		{"IQUERY", append(header(1<<11, 0, 1, 0, 0), rrA...), NotImp, flags(1 << 11)},
		{"STATUS", header(2<<11, 0, 0, 0, 0), NotImp, flags(2 << 11)},
		{"NOTIFY", append(header(4<<11|FlagAA, 1, 0, 0, 0), qA...), NotImp, flags(4<<11 | FlagAA)},
		{"UPDATE", append(header(5<<11, 1, 0, 1, 0), qA...), NotImp, flags(5 << 11)},
		{"DSO", header(6<<11, 0, 0, 0, 0), NotImp, flags(6 << 11)},
		{"opcode 15, malformed", header(15<<11, 7, 7, 7, 7), NotImp, flags(15 << 11)},
		{"QDCOUNT 0", header(FlagRD, 0, 0, 0, 0), FormErr, noQuestion},
		{"QDCOUNT 0, only a cookie", append(header(FlagRD, 0, 0, 0, 1), withOptions(option(optCookie, "12345678"))...), FormErr, noQuestion},
		{"QDCOUNT 2", append(header(FlagRD, 2, 0, 0, 0), qA+qA...), FormErr, noQuestion},
		{"QDCOUNT 65535", append(header(FlagRD, 65535, 0, 0, 0), qA...), FormErr, noQuestion},
		{"an answer record", append(header(FlagRD, 1, 1, 0, 0), qA+rrA...), FormErr, base},
		{"an authority record", append(header(FlagRD, 1, 0, 1, 0), qA+rrA...), FormErr, base},
		{
			"IXFR", append(header(FlagRD, 1, 0, 1, 0), qWWW+"\x00\xfb\x00\x01"+rrA...), FormErr,
			with(func(q *Query) { q.Type = TypeIXFR }),
		},

		// Question.
		{"no question", query(0), FormErr, noQuestion},
		{"name cut short", query(0, "\x03ww"), FormErr, noQuestion},
		{"type cut short", query(0, qWWW, "\x00"), FormErr, noQuestion},
		{"class cut short", query(0, qWWW, "\x00\x01\x00"), FormErr, noQuestion},
		{"compressed qname", query(0, "\xc0\x0c\x00\x01\x00\x01"), FormErr, noQuestion},
		{"qname compressed into the header", query(0, "\x03www\xc0\x04\x00\x01\x00\x01"), FormErr, noQuestion},
		{"label type 0x40", query(0, "\x41", strings.Repeat("x", 65), "\x00\x00\x01\x00\x01"), FormErr, noQuestion},
		{"label type 0x80", query(0, "\x80", strings.Repeat("x", 128), "\x00\x00\x01\x00\x01"), FormErr, noQuestion},
		{
			"label of 63 octets", query(0, "\x3f", strings.Repeat("x", 63), "\x00\x00\x01\x00\x01"), Accept,
			with(func(q *Query) { q.NameLen = 65 }),
		},
		{"name of 255 octets", query(0, longName(255), "\x00\x01\x00\x01"), Accept, with(func(q *Query) { q.NameLen = 255 })},
		{"name of 256 octets", query(0, longName(256), "\x00\x01\x00\x01"), FormErr, noQuestion},
		{"qtype OPT", query(0, qWWW, TypeOPT, ClassIN), FormErr, with(func(q *Query) { q.Type = TypeOPT })},

		// OPT.
		{"OPT", query(1, qA, opt), Accept, edns},
		{
			"DO", query(1, qA, optDO, uint16(0)), Accept,
			with(func(q *Query) { q.EDNS, q.DO, q.UDPSize = true, true, 1232 }),
		},
		{"reserved flags", query(1, qA, optZero, "\x00\x7f\xff", uint16(0)), Accept, edns},
		{"upper rcode bits", query(1, qA, "\x00\x00\x29\x04\xd0\xff\x00\x00\x00\x00\x00"), Accept, edns},
		{
			"size 0", query(1, qA, "\x00\x00\x29\x00\x00\x00\x00\x00\x00\x00\x00"), Accept,
			with(func(q *Query) { q.EDNS = true }),
		},
		{
			"size 511", query(1, qA, "\x00\x00\x29\x01\xff\x00\x00\x00\x00\x00\x00"), Accept,
			with(func(q *Query) { q.EDNS = true }),
		},
		{
			"size 65535", query(1, qA, "\x00\x00\x29\xff\xff\x00\x00\x00\x00\x00\x00"), Accept,
			with(func(q *Query) { q.EDNS, q.UDPSize = true, 65535 }),
		},
		{"OPT behind another record", query(2, qA, rrA, opt), Accept, edns},
		{"OPT in front of another record", query(2, qA, opt, rrA), Accept, edns},
		{"OPT between others", query(3, qA, rrA, opt, rrA), Accept, edns},
		{"two OPTs", query(2, qA, opt, opt), FormErr, edns},
		{"two OPTs, apart", query(3, qA, opt, rrA, opt), FormErr, edns},
		{"OPT with a name", query(1, qA, "\x01x", opt), FormErr, base}, // "x" and opt's root octet
		{"OPT at the root through a pointer", query(1, qA, "\xc0\x18", opt[1:]), FormErr, base},
		{"OPT in the answer section", append(header(FlagRD, 1, 1, 0, 0), qA+opt...), FormErr, base},
		{"OPT in the authority section", append(header(FlagRD, 1, 0, 1, 0), qA+opt...), FormErr, base},
		{
			"version 1", query(1, qA, optV1, uint16(0)), BadVers,
			with(func(q *Query) { q.EDNS, q.DO, q.Version, q.UDPSize = true, true, 1, 1232 }),
		},
		{
			"version 255", query(1, qA, optZero, "\xff\x00\x00", uint16(0)), BadVers,
			with(func(q *Query) { q.EDNS, q.Version, q.UDPSize = true, 255, 1232 }),
		},
		{
			"version 1, options not as in version 0", query(1, qA, optV1, uint16(3), "xyz"), BadVers,
			with(func(q *Query) { q.EDNS, q.DO, q.Version, q.UDPSize = true, true, 1, 1232 }),
		},
		{
			"version 1, malformed message", query(2, qA, optV1, uint16(0)), FormErr,
			with(func(q *Query) { q.EDNS, q.DO, q.Version, q.UDPSize = true, true, 1, 1232 }),
		},

		// Options.
		{"unknown options", query(1, qA, withOptions(option(65001, "x"), option(0, ""), option(8, "y"))), Accept, edns},
		{"option header cut short", query(1, qA, withOptions("\x00\x0a\x00")), FormErr, edns},
		{"option value cut short", query(1, qA, withOptions("\xff\x01\x00\x02x")), FormErr, edns},
		{"second option cut short", query(1, qA, withOptions(option(65001, "x"), "\xff")), FormErr, edns},
		{
			"keepalive", query(1, qA, withOptions(option(optKeepalive, ""))), Accept,
			with(func(q *Query) { q.EDNS, q.Keepalive, q.UDPSize = true, true, 1232 }),
		},
		{"keepalive with a value", query(1, qA, withOptions(option(optKeepalive, "\x00\x10"))), Accept, edns},
		{"keepalive with a bad value", query(1, qA, withOptions(option(optKeepalive, "x"))), Accept, edns},
		{
			"keepalive among others",
			query(1, qA, withOptions(option(optPadding, "\x00"), option(optKeepalive, ""), option(optKeepalive, "xx"))), Accept,
			with(func(q *Query) { q.EDNS, q.Keepalive, q.UDPSize = true, true, 1232 }),
		},

		// The rest of the additional section.
		{"TSIG", query(1, qA, rrTSIG), Accept, base},
		{"OPT and TSIG", query(2, qA, opt, rrTSIG), Accept, edns},
		{"SIG(0)", query(1, qA, rrSIG0), Accept, base},
		{"fewer records than counted", query(2, qA, opt), FormErr, edns},
		{"65535 records counted", query(65535, qA, opt), FormErr, edns},
		{"record name malformed", query(1, qA, "\xc0\xff", opt[1:]), FormErr, base},
		{"record header cut short", query(1, qA, opt[:10]), FormErr, base},
		{"RDATA cut short", query(1, qA, optV0, uint16(1)), FormErr, base},
	}
	for opcode := range uint16(16) {
		tt := test{fmt.Sprintf("opcode %d", opcode), append(header(opcode<<11, 1, 0, 0, 0), qA...), NotImp, flags(opcode << 11)}
		if opcode == 0 {
			tt.want, tt.q = Accept, with(func(q *Query) { q.Flags = 0 })
		}
		tests = append(tests, tt)
	}
	for n := range 43 {
		tt := test{
			fmt.Sprintf("cookie of %d octets", n),
			query(1, qA, withOptions(option(optCookie, strings.Repeat("c", n)))), FormErr, edns,
		}
		if n == 8 || n >= 16 && n <= 40 { // RFC 7873 section 5.2.2
			tt.want = Accept
		}
		tests = append(tests, tt)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg := exact(tt.msg)
			q := Query{Keepalive: true, Version: 7, NameLen: 99} // must be overwritten
			got := ParseQuery(msg, &q)
			if got != tt.want {
				t.Errorf("verdict %d, want %d", got, tt.want)
			}
			if d := cmp.Diff(tt.q, q); d != "" {
				t.Errorf("query (-want +got):\n%s", d)
			}
			if !bytes.Equal(msg, tt.msg) {
				t.Error("the message was changed")
			}
			checkErrorAnswer(t, msg, &q, got)
		})
	}
}

// checkErrorAnswer checks that every refusal can be answered from what
// ParseQuery found, with an answer that miekg/dns understands.
func checkErrorAnswer(t *testing.T, msg []byte, q *Query, v Verdict) {
	t.Helper()
	rcode, ok := map[Verdict]uint16{
		FormErr: RcodeFormErr, NotImp: RcodeNotImp, BadVers: RcodeBadVers, Accept: RcodeServFail,
	}[v]
	if !ok {
		return
	}
	out := AppendError(nil, msg, q, rcode, OPT{Size: 1232})
	m := new(dns.Msg)
	if err := m.Unpack(out); err != nil {
		t.Fatalf("answer %x: %v", out, err)
	}
	if m.Id != q.ID || !m.Response || m.Rcode != int(rcode) || m.Opcode != int(q.Flags>>11&15) ||
		m.RecursionDesired != q.RD() || m.CheckingDisabled != q.CD() || m.Authoritative || m.Truncated ||
		m.AuthenticatedData || m.Zero || !m.RecursionAvailable {
		t.Errorf("answer to flags %04x: %s", q.Flags, m.MsgHdr.String())
	}
	if (len(m.Question) == 1) != (q.NameLen > 0) || len(m.Answer)+len(m.Ns) > 0 {
		t.Errorf("answer has %d questions, name of %d octets", len(m.Question), q.NameLen)
	}
	if !bytes.Equal(out[HeaderLen:q.QuestionEnd()], msg[HeaderLen:q.QuestionEnd()]) {
		t.Error("the question does not come back as it was sent")
	}
	o := m.IsEdns0()
	if (o != nil) != q.EDNS {
		t.Fatalf("OPT %v, EDNS %t", o, q.EDNS)
	}
	if o != nil && (o.Do() != q.DO || o.Version() != 0 || o.UDPSize() != 1232) {
		t.Errorf("OPT %v", o)
	}
	if q.EDNS == (len(out) == q.QuestionEnd()) {
		t.Errorf("answer of %d octets", len(out))
	}
}

func TestParseQueryCutAtEveryOctet(t *testing.T) {
	whole := append(header(FlagRD, 1, 0, 0, 2), qA+withOptions(option(optCookie, "12345678"), option(optKeepalive, ""))+rrTSIG...)
	for n := range whole {
		want := FormErr
		if n < HeaderLen {
			want = Drop
		}
		msg := exact(whole[:n])
		var q Query
		if got := ParseQuery(msg, &q); got != want {
			t.Errorf("%d octets: verdict %d, want %d", n, got, want)
		}
		checkErrorAnswer(t, msg, &q, want)
	}
	if got := ParseQuery(exact(whole), new(Query)); got != Accept {
		t.Errorf("whole: verdict %d", got)
	}
}

func TestQueryMethods(t *testing.T) {
	for bit, get := range map[uint16]func(*Query) bool{FlagRD: (*Query).RD, FlagAD: (*Query).AD, FlagCD: (*Query).CD} {
		if get(&Query{Flags: ^bit}) || !get(&Query{Flags: bit}) {
			t.Errorf("flag %04x is read wrong", bit)
		}
	}
	msg := exact(append(header(FlagRD, 1, 0, 0, 0), qA...))
	var q Query
	ParseQuery(msg, &q)
	if got := q.Name(msg); string(got) != qWWW {
		t.Errorf("Name = %q", got)
	}
	if got, want := q.QuestionEnd(), len(msg); got != want {
		t.Errorf("QuestionEnd = %d, want %d", got, want)
	}
	if got := new(Query).QuestionEnd(); got != HeaderLen {
		t.Errorf("QuestionEnd without a question = %d", got)
	}
}
