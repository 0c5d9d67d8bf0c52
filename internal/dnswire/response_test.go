package dnswire

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

const fQR = FlagQR | FlagRD | FlagRA

func TestParseResponse(t *testing.T) {
	msg := answer{
		qname: "Www.Example.", aa: true, edns: true, optFirst: true, rcode: 0x123,
		an: []string{"www.example. 60 CNAME web.example.", "web.example. 30 A 192.0.2.1"},
		ns: []string{"example. 3600 NS ns.example."},
		ar: []string{"ns.example. 3600 AAAA 2001:db8::1"},
	}.pack(t)
	before := bytes.Clone(msg)
	msg = exact(append(msg, "trailing"...))
	r := Response{Records: make([]Record, 0, 9), NameLen: 9, Unchecked: true, OPTEnd: 7} // must be overwritten
	if err := ParseResponse(msg, &r); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(msg[:len(before)], before) {
		t.Error("the message was changed")
	}
	if cap(r.Records) != 9 {
		t.Errorf("Records has a capacity of %d: it was not used again", cap(r.Records))
	}
	rrs, err := plainWalk(msg, HeaderLen+r.NameLen+4, 5)
	if err != nil {
		t.Fatal(err)
	}
	record := func(rr plainRR, s Section) Record {
		data := rr.end - len(rr.rdata)
		return Record{Off: rr.off, TTLOff: data - 6, DataOff: data, End: rr.end, Type: rr.typ, Class: rr.class, Section: s}
	}
	want := Response{
		ID: 0x1234, Flags: FlagQR | FlagAA | FlagRD | FlagRA | 3, Rcode: 0x123,
		NameLen: 13, Type: TypeA, Class: ClassIN,
		Records: []Record{record(rrs[0], Answer), record(rrs[1], Answer), record(rrs[2], Authority), record(rrs[4], Additional)},
		EDNS:    true, OPTOff: rrs[3].off, OPTEnd: rrs[3].end, UDPSize: 1232, End: len(before),
	}
	if d := cmp.Diff(want, r); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// TestParseResponseVerdicts: want is nil for accepted answers.
func TestParseResponseVerdicts(t *testing.T) {
	reply := func(flags, an, ns, ar uint16, parts ...any) []byte {
		return append(header(fQR|flags, 1, an, ns, ar), wire(qA, wire(parts...))...)
	}
	tests := []struct {
		name  string
		msg   []byte
		want  error
		check func(*Response) bool
	}{
		{"NODATA without anything", reply(0, 0, 0, 0), nil, func(r *Response) bool { return len(r.Records) == 0 && r.End == 12+17 }},
		{"one record", reply(0, 1, 0, 0, rrA), nil, func(r *Response) bool { return len(r.Records) == 1 && !r.Unchecked }},
		{"trailing octets", reply(0, 1, 0, 0, rrA, "more"), nil, func(r *Response) bool { return r.End == 12+17+16 }},

		// Header.
		{"empty", nil, errShort, nil},
		{"11 octets", header(fQR, 1, 0, 0, 0)[:11], errShort, nil},
		{"a query", append(header(FlagRD, 1, 0, 0, 0), qA...), errNotResponse, nil},
		{"opcode NOTIFY", append(header(fQR|4<<11, 1, 0, 0, 0), qA...), errNotResponse, nil},
		{"opcode 8", append(header(fQR|8<<11, 1, 0, 0, 0), qA...), errNotResponse, nil},

		// Question.
		{"QDCOUNT 0, NOERROR", header(fQR, 0, 0, 0, 0), errQuestion, nil},
		{"QDCOUNT 0, NXDOMAIN", header(fQR|3, 0, 0, 0, 0), errQuestion, nil},
		{"QDCOUNT 0, NOERROR with a record", append(header(fQR, 0, 1, 0, 0), record("\x00", TypeA, 1, 0, "1234")...), errQuestion, nil},
		{"QDCOUNT 2", append(header(fQR, 2, 0, 0, 0), qA+qA...), errQuestion, nil},
		{"QDCOUNT 2, SERVFAIL", append(header(fQR|2, 2, 0, 0, 0), qA+qA...), errQuestion, nil},
		{"FORMERR without a question", header(fQR|1, 0, 0, 0, 0), nil, func(r *Response) bool { return r.NameLen == 0 && r.Rcode == RcodeFormErr && r.End == 12 }},
		{"FORMERR without a question, trailing octets", append(header(fQR|1, 0, 0, 0, 0), qA...), nil, func(r *Response) bool { return r.NameLen == 0 }},
		{"FORMERR without a question but OPT", append(header(fQR|1, 0, 0, 0, 1), opt...), nil, func(r *Response) bool { return r.EDNS && r.OPTLast }},
		{"FORMERR without a question, answer record", append(header(fQR|1, 0, 1, 0, 0), record("\x00", TypeA, 1, 0, "1234")...), errQuestion, nil},
		{"FORMERR without a question, authority record", append(header(fQR|1, 0, 0, 1, 0), record("\x00", TypeA, 1, 0, "1234")...), errQuestion, nil},
		{"FORMERR without a question, additional record", append(header(fQR|1, 0, 0, 0, 1), record("\x00", TypeA, 1, 0, "1234")...), errQuestion, nil},
		{"FORMERR without a question, TC, record cut short", append(header(fQR|FlagTC|1, 0, 1, 0, 0), 0), errRecord, nil},
		{"REFUSED, bare header that counts a question", header(fQR|5, 1, 0, 0, 1), nil, func(r *Response) bool { return r.NameLen == 0 && r.Rcode == RcodeRefused && r.End == 12 }},
		{"NOERROR, bare header that counts a question", header(fQR, 1, 0, 0, 0), errName, nil},
		{"NXDOMAIN, bare header that counts a question", header(fQR|3, 1, 0, 0, 0), errName, nil},
		{"SERVFAIL, question cut short", append(header(fQR|2, 1, 0, 0, 0), qA[:16]...), errRecord, nil},
		{"compressed qname", append(header(fQR, 1, 0, 0, 0), "\xc0\x0c\x00\x01\x00\x01"...), errName, nil},
		{"qname of 255 octets", append(header(fQR, 1, 0, 0, 0), longName(255)+"\x00\x01\x00\x01"...), nil, func(r *Response) bool { return r.NameLen == 255 }},
		{"qname of 256 octets", append(header(fQR, 1, 0, 0, 0), longName(256)+"\x00\x01\x00\x01"...), errName, nil},

		// OPT.
		{
			"OPT last", reply(0, 1, 0, 1, rrA, opt), nil,
			func(r *Response) bool {
				return r.EDNS && r.OPTLast && !r.DO && r.UDPSize == 1232 && r.OPTOff == 45 && r.OPTEnd == 56 && r.End == 56 && len(r.Records) == 1
			},
		},
		{"OPT not last", reply(0, 0, 0, 2, opt, rrA), nil, func(r *Response) bool { return r.EDNS && !r.OPTLast && r.End == 56 && r.OPTEnd == 40 }},
		{"OPT last, trailing octets", reply(0, 0, 0, 1, opt, "x"), nil, func(r *Response) bool { return r.OPTLast }},
		{"no OPT", reply(0, 1, 0, 0, rrA), nil, func(r *Response) bool { return !r.EDNS && !r.OPTLast && r.UDPSize == 0 }},
		{"OPT, size 0", reply(0, 0, 0, 1, "\x00\x00\x29\x00\x00\x00\x00\x00\x00\x00\x00"), nil, func(r *Response) bool { return r.UDPSize == 512 }},
		{"OPT, DO", reply(0, 0, 0, 1, optDO, uint16(0)), nil, func(r *Response) bool { return r.DO }},
		{"OPT, version 1", reply(0, 0, 0, 1, optV1, uint16(0)), nil, func(r *Response) bool { return r.EDNS }},
		{"extended rcode", reply(2, 0, 0, 1, "\x00\x00\x29\x04\xd0\x01\x00\x00\x00\x00\x00"), nil, func(r *Response) bool { return r.Rcode == 18 }},
		{"BADVERS", reply(0, 0, 0, 1, "\x00\x00\x29\x04\xd0\x01\x00\x00\x00\x00\x00"), nil, func(r *Response) bool { return r.Rcode == RcodeBadVers }},
		{"all rcode bits", reply(15, 0, 0, 1, "\x00\x00\x29\x04\xd0\xff\x00\x00\x00\x00\x00"), nil, func(r *Response) bool { return r.Rcode == 4095 }},
		{"two OPTs", reply(0, 0, 0, 2, opt, opt), errOPT, nil},
		{"OPT with a name", reply(0, 0, 0, 1, "\x01x", opt), errOPT, nil},
		{"OPT in the answer section", reply(0, 1, 0, 0, opt), errOPT, nil},
		{"OPT in the authority section", reply(0, 0, 1, 0, opt), errOPT, nil},
		{"OPT, option cut short", reply(0, 0, 0, 1, withOptions("\x00\x0a\x00\x09x")), errOPT, nil},
		{
			"OPT, checked options",
			reply(0, 0, 0, 1, withOptions(option(optNSID, "id"), option(optCookie, "short"), option(optPadding, "\x00\x00"),
				option(optKeepalive, ""), option(optKeepalive, "xx"), option(optEDE, "\x00\x03"), option(optEDE, "\x00\x03text"))), nil,
			func(r *Response) bool { return !r.Unchecked },
		},
		{"OPT, keepalive of 1 octet", reply(0, 0, 0, 1, withOptions(option(optKeepalive, "x"))), nil, func(r *Response) bool { return r.Unchecked }},
		{"OPT, EDE of 1 octet", reply(0, 0, 0, 1, withOptions(option(optEDE, "x"))), nil, func(r *Response) bool { return r.Unchecked }},
		{"OPT, client subnet", reply(0, 0, 0, 1, withOptions(option(8, "\x00\x01\x18\x00\x0a\x00\x00"), option(optNSID, ""))), nil, func(r *Response) bool { return r.Unchecked }},

		// Records.
		{"record missing", reply(0, 1, 0, 0), errName, nil},
		{"second record missing", reply(0, 2, 0, 0, rrA), errName, nil},
		{"65535 records counted", reply(0, 65535, 65535, 65535, rrA), errName, nil},
		{"owner is a loop", reply(0, 1, 0, 0, "\xc0\x1d", rrA[2:]), errName, nil},
		{"owner is a forward pointer", reply(0, 1, 0, 0, "\xc0\x1f", rrA[2:]), errName, nil},
		{"owner points into the header", reply(0, 1, 0, 0, "\xc0\x00", rrA[2:]), errName, nil},
		{"fixed part cut short", reply(0, 1, 0, 0, rrA[:11]), errRecord, nil},
		{"RDATA cut short", reply(0, 1, 0, 0, rrA[:15]), errRecord, nil},
		{"A of 3 octets", reply(0, 1, 0, 0, record("\xc0\x0c", TypeA, 1, 0, "123"), "4"), errRData, nil},
		{"any class", reply(0, 1, 0, 0, record("\xc0\x0c", TypeA, 77, 0, "1234")), nil, func(r *Response) bool { return r.Records[0].Class == 77 }},
		{"TSIG", reply(0, 0, 0, 1, rrTSIG), nil, func(r *Response) bool { return r.Unchecked && len(r.Records) == 1 }},

		// TC: cut anywhere behind the question.
		{"TC, whole", reply(FlagTC, 1, 0, 1, rrA, opt), nil, func(r *Response) bool { return len(r.Records) == 1 && r.EDNS && r.End == 56 }},
		{"TC, counts too high", reply(FlagTC, 9, 0, 0, rrA), nil, func(r *Response) bool { return len(r.Records) == 1 && r.End == 45 }},
		{"TC, record cut short", reply(FlagTC, 2, 0, 0, rrA, rrA[:9]), nil, func(r *Response) bool { return len(r.Records) == 1 && r.End == 45 }},
		{"TC, bad OPT", reply(FlagTC, 1, 0, 1, rrA, withOptions(option(8, ""), "x")), nil, func(r *Response) bool { return !r.EDNS && !r.Unchecked && r.End == 45 }},
		{"TC, OPT cut short", reply(FlagTC, 1, 0, 1, rrA, opt[:10]), nil, func(r *Response) bool { return !r.EDNS && r.End == 45 && !r.OPTLast }},
		{"TC, unchecked record malformed", reply(FlagTC, 1, 0, 0, rrTSIG[:14]), nil, func(r *Response) bool { return !r.Unchecked && r.End == 29 }},
		{"TC, question cut short", append(header(fQR|FlagTC, 1, 0, 0, 0), qA[:16]...), errRecord, nil},
		{"TC, bare header", header(fQR|FlagTC, 1, 1, 0, 0), errName, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var r Response
			err := ParseResponse(exact(tt.msg), &r)
			if !errors.Is(err, tt.want) {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if err == nil && !tt.check(&r) {
				t.Errorf("response %+v", r)
			}
		})
	}
}

// rdataCases are the types whose RDATA is checked, with one good RDATA each. The
// octet 12 of the message is the qname, octet 16 its parent.
var rdataCases = []struct {
	typ   uint16
	rdata string
}{
	{TypeA, "1234"},
	{TypeAAAA, "0123456789abcdef"},
	{TypeNS, "\x02ns\xc0\x10"},
	{TypeCNAME, "\x01x\x00"},
	{TypePTR, "\xc0\x0c"},
	{TypeDNAME, "\x01x\xc0\x0c"},
	{TypeMB, "\x01x\x00"},
	{TypeMD, "\x01x\x00"},
	{TypeMF, "\x01x\x00"},
	{TypeMG, "\x01x\x00"},
	{TypeMR, "\x01x\x00"},
	{TypeSOA, "\x02ns\xc0\x10" + "\x01h\x00" + "0123456789abcdefghij"},
	{TypeMX, "\x00\x0a" + "\x02mx\xc0\x10"},
	{TypeSRV, "\x00\x01\x00\x02\x00\x35" + "\x02ns\xc0\x10"},
	{TypeTXT, "\x05hello"},
}

func TestCheckedRData(t *testing.T) {
	parse := func(typ uint16, rdata, after string) (*Response, error) {
		msg := append(header(fQR, 1, 1, 0, 0), qA...)
		msg = append(msg, record("\xc0\x0c", typ, ClassIN, 60, rdata)...)
		r := new(Response)
		return r, ParseResponse(exact(append(msg, after...)), r)
	}
	for _, tt := range rdataCases {
		t.Run(dns.TypeToString[tt.typ], func(t *testing.T) {
			r, err := parse(tt.typ, tt.rdata, "")
			if err != nil || r.Unchecked {
				t.Fatalf("good RDATA: %v, unchecked %t", err, r.Unchecked)
			}
			// Too short, with and without octets behind the record that a
			// careless reader would take for the rest.
			for n := range len(tt.rdata) {
				for _, after := range []string{"", tt.rdata[n:], "\x00\x00\x00\x00"} {
					if _, err := parse(tt.typ, tt.rdata[:n], after); !errors.Is(err, errRData) {
						t.Errorf("%d of %d octets, %d more behind: error %v", n, len(tt.rdata), len(after), err)
					}
				}
			}
			if _, err := parse(tt.typ, tt.rdata+"\x01", ""); !errors.Is(err, errRData) {
				t.Errorf("one octet too many: error %v", err)
			}
			// Malformed names: each octet of a name turned into a bad label type.
			if tt.typ != TypeA && tt.typ != TypeAAAA && tt.typ != TypeTXT {
				skip := map[uint16]int{TypeMX: 2, TypeSRV: 6}[tt.typ]
				for _, bad := range []string{"\x40", "\x80", "\xc1", "\xc0\x00", "\xc0\x2b", "\xff\xff"} {
					rdata := tt.rdata[:skip] + bad + tt.rdata[skip+1:]
					if _, err := parse(tt.typ, rdata, ""); !errors.Is(err, errRData) {
						t.Errorf("name starts with %x: error %v", bad, err)
					}
				}
			}
		})
	}
	txt := []struct {
		name, rdata string
		ok          bool
	}{
		{"two strings", "\x01a\x02bc", true},
		{"an empty string", "\x00", true},
		{"255 octets", "\xff" + strings.Repeat("x", 255), true},
		{"no string", "", false}, // RFC 1035 section 3.3.14: one or more
		{"second string cut short", "\x01a\x02b", false},
	}
	for _, tt := range txt {
		t.Run("TXT/"+tt.name, func(t *testing.T) {
			if _, err := parse(TypeTXT, tt.rdata, ""); (err == nil) != tt.ok {
				t.Errorf("error %v, want ok %t", err, tt.ok)
			}
		})
	}
	t.Run("unchecked", func(t *testing.T) {
		for typ := range uint16(300) {
			known := typ == TypeOPT
			for _, c := range rdataCases {
				known = known || typ == c.typ
			}
			if known {
				continue
			}
			for _, rdata := range []string{"", "\xff\xff\xff"} {
				if r, err := parse(typ, rdata, ""); err != nil || !r.Unchecked {
					t.Errorf("type %d: error %v, unchecked %t", typ, err, r.Unchecked)
				}
			}
		}
	})
	t.Run("unchecked among checked", func(t *testing.T) {
		msg := answer{an: []string{"www.example. A 192.0.2.1"}, ns: []string{"example. CAA 0 issue x"}, ar: []string{"a.example. A 192.0.2.1"}}.pack(t)
		if r := mustParse(t, msg); !r.Unchecked {
			t.Error("Unchecked is not set")
		}
	})
}

func TestParseResponseCutAtEveryOctet(t *testing.T) {
	a := answer{
		an: []string{"www.example. CNAME web.example.", "web.example. A 192.0.2.1", "web.example. A 192.0.2.2"},
		ns: []string{"example. SOA ns.example. host.example. 1 2 3 4 5"},
		ar: []string{"x.example. TXT one two", "x.example. MX 1 m.example.", "x.example. SRV 1 2 3 m.example."}, edns: true,
		optionsInReply: []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: 3, ExtraText: "text"}},
	}
	question := HeaderLen + len(qA)
	for _, tc := range []bool{false, true} {
		a.tc = tc
		whole := a.pack(t)
		full := mustParse(t, whole)
		for n := range whole {
			var r Response
			err := ParseResponse(exact(whole[:n]), &r)
			if ok := tc && n >= question; (err == nil) != ok {
				t.Errorf("TC %t, %d octets: error %v", tc, n, err)
			}
			if err != nil {
				continue
			}
			if k := len(r.Records); !slices.Equal(r.Records, full.Records[:k]) || r.EDNS || r.End > n || k < len(full.Records) && full.Records[k].End <= n {
				t.Errorf("%d octets: %+v", n, r)
			}
		}
	}
	// A bare header of an error answer is one; anything between it and the
	// end of the question is not.
	whole := answer{rcode: dns.RcodeRefused}.pack(t)
	for n := range whole {
		if err := ParseResponse(exact(whole[:n]), new(Response)); (err == nil) != (n == HeaderLen) {
			t.Errorf("REFUSED, %d octets: error %v", n, err)
		}
	}
}

func TestRecordTTL(t *testing.T) {
	for ttl, want := range map[uint32]uint32{
		0: 0, 1: 1, 1<<31 - 1: 1<<31 - 1, 1 << 31: 0, 1<<32 - 1: 0, // RFC 2181 section 8
	} {
		msg := exact(wire("pad", ttl))
		if got := (&Record{TTLOff: 3}).TTL(msg); got != want {
			t.Errorf("TTL %d is read as %d, want %d", ttl, got, want)
		}
	}
}
