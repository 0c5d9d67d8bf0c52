package dnswire

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// unpackOPT reads a lone OPT record with miekg/dns.
func unpackOPT(t *testing.T, b []byte) *dns.OPT {
	t.Helper()
	rr, n, err := dns.UnpackRR(b, 0)
	if err != nil || n != len(b) {
		t.Fatalf("unpack %x: %d of %d octets, %v", b, n, len(b), err)
	}
	o, ok := rr.(*dns.OPT)
	if !ok || o.Hdr.Name != "." {
		t.Fatalf("not an OPT record: %v", rr)
	}
	return o
}

func TestAppendOPT(t *testing.T) {
	ede := func(code uint16, text string) dns.EDNS0 { return &dns.EDNS0_EDE{InfoCode: code, ExtraText: text} }
	keepalive := func(units uint16) dns.EDNS0 {
		return &dns.EDNS0_TCP_KEEPALIVE{Timeout: units}
	}
	tests := []struct {
		name    string
		opt     OPT
		options []dns.EDNS0
	}{
		{"empty", OPT{}, nil},
		{"size", OPT{Size: 1232}, nil},
		{"DO", OPT{Size: 65535, DO: true}, nil},
		{"upper rcode bits", OPT{Rcode: 0xabc}, nil},
		{"BADVERS", OPT{Rcode: RcodeBadVers}, nil},
		{"EDE", OPT{HasEDE: true, EDE: EDEStale}, []dns.EDNS0{ede(3, "")}},
		{"EDE 0", OPT{HasEDE: true, EDE: EDEOther, EDEText: "x"}, []dns.EDNS0{ede(0, "x")}},
		{"EDE without HasEDE", OPT{EDE: EDEStale, EDEText: "x"}, nil},
		{"EDE text of 64 octets", OPT{HasEDE: true, EDE: 65535, EDEText: strings.Repeat("x", 64)}, []dns.EDNS0{ede(65535, strings.Repeat("x", 64))}},
		{"EDE text of 65 octets", OPT{HasEDE: true, EDEText: strings.Repeat("x", 65)}, []dns.EDNS0{ede(0, strings.Repeat("x", 64))}},
		{"EDE text cut at a character", OPT{HasEDE: true, EDEText: strings.Repeat("x", 62) + "€uro"}, []dns.EDNS0{ede(0, strings.Repeat("x", 62))}},
		{"EDE text, the last character fits", OPT{HasEDE: true, EDEText: strings.Repeat("x", 61) + "€uro"}, []dns.EDNS0{ede(0, strings.Repeat("x", 61)+"€")}},
		{"EDE text that is no UTF-8", OPT{HasEDE: true, EDEText: strings.Repeat("\x80", 99)}, []dns.EDNS0{ede(0, "")}},
		{"keepalive", OPT{Keepalive: 30 * time.Second}, []dns.EDNS0{keepalive(300)}},
		{"keepalive, rounded down", OPT{Keepalive: 1999 * time.Millisecond}, []dns.EDNS0{keepalive(19)}},
		{"keepalive, below one step", OPT{Keepalive: time.Nanosecond}, []dns.EDNS0{keepalive(0)}},
		{"keepalive, greatest", OPT{Keepalive: 65535 * 100 * time.Millisecond}, []dns.EDNS0{keepalive(65535)}},
		{"keepalive, too great", OPT{Keepalive: 1000 * time.Hour}, []dns.EDNS0{keepalive(65535)}},
		{"keepalive, negative", OPT{Keepalive: -time.Second}, nil},
		{
			"all",
			OPT{Size: 1232, DO: true, Rcode: 0x123, HasEDE: true, EDE: EDENotReady, EDEText: "starting", Keepalive: time.Second},
			[]dns.EDNS0{ede(14, "starting"), keepalive(10)},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := AppendOPT([]byte("head"), &tt.opt)
			if !bytes.HasPrefix(b, []byte("head")) {
				t.Fatalf("what was there is gone: %q", b)
			}
			b = b[len("head"):]
			if len(b) != tt.opt.Len() {
				t.Errorf("%d octets, Len says %d", len(b), tt.opt.Len())
			}
			o := unpackOPT(t, b)
			if o.UDPSize() != tt.opt.Size || o.Do() != tt.opt.DO || o.Version() != 0 || o.Z() != 0 || o.Co() || o.ExtendedRcode() != int(tt.opt.Rcode&^15) {
				t.Errorf("header %v", o.Hdr)
			}
			if d := cmp.Diff(tt.options, o.Option); d != "" {
				t.Errorf("options (-want +got):\n%s", d)
			}
			for _, opt := range o.Option {
				if e, ok := opt.(*dns.EDNS0_EDE); ok && !utf8.ValidString(e.ExtraText) {
					t.Errorf("text %q is not UTF-8 (RFC 8914 section 2)", e.ExtraText)
				}
			}
		})
	}
}

func TestAppendQuery(t *testing.T) {
	tests := []struct {
		name  string
		qname string
		flags uint16
		opt   *OPT
	}{
		{"plain", "www.example.", FlagRD, nil},
		{"root", ".", 0, nil},
		{"EDNS", "WWW.example.", FlagRD | FlagAD | FlagCD, &OPT{Size: 1232}},
		{"DO", "www.example.", FlagRD | FlagCD, &OPT{Size: 4096, DO: true}},
		{"longest name", strings.Repeat("a.", 127), FlagRD, &OPT{Size: 1232}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := AppendQuery([]byte("head"), 0xbeef, tt.flags, wireName(t, tt.qname), TypeAAAA, ClassIN, tt.opt)
			b = exact(b[len("head"):])
			got := new(dns.Msg)
			if err := got.Unpack(b); err != nil {
				t.Fatal(err)
			}
			want := &dns.Msg{
				MsgHdr: dns.MsgHdr{
					Id: 0xbeef, RecursionDesired: tt.flags&FlagRD != 0,
					AuthenticatedData: tt.flags&FlagAD != 0, CheckingDisabled: tt.flags&FlagCD != 0,
				},
				Question: []dns.Question{{Name: tt.qname, Qtype: dns.TypeAAAA, Qclass: dns.ClassINET}},
			}
			if tt.opt != nil {
				want.SetEdns0(tt.opt.Size, tt.opt.DO)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			var q Query
			if v := ParseQuery(b, &q); v != Accept || q.EDNS != (tt.opt != nil) || q.QuestionEnd() > len(b) {
				t.Errorf("verdict %d, %+v", v, q)
			}
		})
	}
}

func TestAppendQuestion(t *testing.T) {
	got := AppendQuestion([]byte("head"), []byte("\x01a\x00"), TypeHTTPS, ClassIN)
	if want := "head\x01a\x00\x00\x41\x00\x01"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAppendError(t *testing.T) {
	query := func(flags uint16, opt *OPT) []byte {
		return AppendQuery(nil, 0xbeef, flags, wireName(t, "wWw.eXample."), TypeA, ClassIN, opt)
	}
	tests := []struct {
		name  string
		query []byte
		rcode uint16
		opt   OPT
		want  *dns.Msg
	}{
		{
			"SERVFAIL", query(FlagRD, nil), RcodeServFail,
			OPT{Size: 1232, HasEDE: true},
			&dns.Msg{
				MsgHdr:   dns.MsgHdr{Id: 0xbeef, Response: true, RecursionDesired: true, RecursionAvailable: true, Rcode: dns.RcodeServerFailure},
				Question: []dns.Question{{Name: "wWw.eXample.", Qtype: 1, Qclass: 1}},
			},
		},
		{
			"all flags", query(FlagAA|FlagTC|FlagRA|1<<6|FlagAD|FlagCD|15, nil), RcodeRefused,
			OPT{},
			&dns.Msg{
				MsgHdr:   dns.MsgHdr{Id: 0xbeef, Response: true, RecursionAvailable: true, CheckingDisabled: true, Rcode: dns.RcodeRefused},
				Question: []dns.Question{{Name: "wWw.eXample.", Qtype: 1, Qclass: 1}},
			},
		},
		{
			"EDNS, DO", query(FlagRD, &OPT{Size: 4096, DO: true}), RcodeServFail,
			OPT{Size: 1232, HasEDE: true, EDE: EDENoReachable, EDEText: "why", Keepalive: time.Second},
			&dns.Msg{
				MsgHdr:   dns.MsgHdr{Id: 0xbeef, Response: true, RecursionDesired: true, RecursionAvailable: true, Rcode: dns.RcodeServerFailure},
				Question: []dns.Question{{Name: "wWw.eXample.", Qtype: 1, Qclass: 1}},
				Extra: []dns.RR{&dns.OPT{
					Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: 1232, Ttl: 1 << 15, Rdlength: 15},
					Option: []dns.EDNS0{
						&dns.EDNS0_EDE{InfoCode: 22, ExtraText: "why"},
						&dns.EDNS0_TCP_KEEPALIVE{Timeout: 10},
					},
				}},
			},
		},
		{
			"BADVERS", append(header(FlagRD, 1, 0, 0, 1), qA+optV1+"\x00\x00"...), RcodeBadVers,
			OPT{Size: 1232},
			&dns.Msg{
				MsgHdr:   dns.MsgHdr{Id: 0x1234, Response: true, RecursionDesired: true, RecursionAvailable: true, Rcode: 16},
				Question: []dns.Question{{Name: "wWw.eXample.", Qtype: 1, Qclass: 1}},
				Extra:    []dns.RR{&dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: 1232, Ttl: 1<<24 | 1<<15}}},
			},
		},
		{
			"FORMERR without a question", header(FlagRD, 0, 0, 0, 0), RcodeFormErr,
			OPT{Size: 1232},
			&dns.Msg{MsgHdr: dns.MsgHdr{Id: 0x1234, Response: true, RecursionDesired: true, RecursionAvailable: true, Rcode: dns.RcodeFormatError}},
		},
		{
			"NOTIMP", append(header(4<<11, 1, 0, 0, 0), qA...), RcodeNotImp,
			OPT{Size: 1232},
			&dns.Msg{MsgHdr: dns.MsgHdr{Id: 0x1234, Response: true, Opcode: dns.OpcodeNotify, RecursionAvailable: true, Rcode: dns.RcodeNotImplemented}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var q Query
			ParseQuery(tt.query, &q)
			before := bytes.Clone(tt.query)
			b := AppendError([]byte("head"), tt.query, &q, tt.rcode, tt.opt)
			if !bytes.Equal(before, tt.query) {
				t.Error("the query was changed")
			}
			got := new(dns.Msg)
			if err := got.Unpack(exact(b[len("head"):])); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			// In place: the answer may take the query's buffer.
			if got := AppendError(tt.query[:0], tt.query, &q, tt.rcode, tt.opt); !bytes.Equal(got, b[len("head"):]) {
				t.Errorf("in place: %x, want %x", got, b[len("head"):])
			}
		})
	}
}

func TestTTLs(t *testing.T) {
	tests := []struct{ ttl, age, want uint32 }{
		{60, 0, 60},
		{60, 1, 59},
		{60, 60, 0},
		{60, 61, 0},
		{0, 1, 0},
		{1<<32 - 1, 1, 1<<32 - 2},
		{5, 1<<32 - 1, 0},
	}
	for _, tt := range tests {
		msg := exact([]byte("pad....pad"))
		SetTTL(msg, 3, tt.ttl)
		AgeTTL(msg, 3, tt.age)
		if want := wire("pad", tt.want, "pad"); !bytes.Equal(msg, want) {
			t.Errorf("TTL %d aged by %d: %x, want %x", tt.ttl, tt.age, msg, want)
		}
	}
}

func TestHeader(t *testing.T) {
	msg := exact(header(1, 2, 3, 4, 5))
	SetID(msg, 0xa1a2)
	SetFlags(msg, 0xb1b2)
	SetCounts(msg, 0xc1c2, 0xd1d2, 0xe1e2, 0xf1f2)
	if want := "\xa1\xa2\xb1\xb2\xc1\xc2\xd1\xd2\xe1\xe2\xf1\xf2"; string(msg) != want {
		t.Errorf("header %x, want %x", msg, want)
	}
	qd, an, ns, ar := Counts(msg)
	if got, want := [...]uint16{ID(msg), Flags(msg), qd, an, ns, ar}, [...]uint16{0xa1a2, 0xb1b2, 0xc1c2, 0xd1d2, 0xe1e2, 0xf1f2}; got != want {
		t.Errorf("header is read as %x, want %x", got, want)
	}
}

// TestConstants compares the protocol's numbers with miekg/dns.
func TestConstants(t *testing.T) {
	types := map[uint16]string{
		TypeA: "A", TypeNS: "NS", TypeMD: "MD", TypeMF: "MF", TypeCNAME: "CNAME", TypeSOA: "SOA", TypeMB: "MB",
		TypeMG: "MG", TypeMR: "MR", TypePTR: "PTR", TypeHINFO: "HINFO", TypeMX: "MX", TypeTXT: "TXT",
		TypeAAAA: "AAAA", TypeSRV: "SRV", TypeDNAME: "DNAME", TypeOPT: "OPT", TypeRRSIG: "RRSIG",
		TypeSVCB: "SVCB", TypeHTTPS: "HTTPS", TypeTKEY: "TKEY", TypeTSIG: "TSIG", TypeIXFR: "IXFR",
		TypeAXFR: "AXFR", TypeMAILB: "MAILB", TypeMAILA: "MAILA", TypeANY: "ANY",
	}
	for n, name := range types {
		if got := dns.TypeToString[n]; got != name {
			t.Errorf("type %d is %s, not %s", n, got, name)
		}
	}
	rcodes := map[uint16]int{
		RcodeNoError: dns.RcodeSuccess, RcodeFormErr: dns.RcodeFormatError, RcodeServFail: dns.RcodeServerFailure,
		RcodeNXDomain: dns.RcodeNameError, RcodeNotImp: dns.RcodeNotImplemented, RcodeRefused: dns.RcodeRefused,
		RcodeBadVers: dns.RcodeBadVers,
	}
	for n, want := range rcodes {
		if int(n) != want {
			t.Errorf("rcode %d should be %d", n, want)
		}
	}
	edes := map[uint16]uint16{
		EDEOther: dns.ExtendedErrorCodeOther, EDEStale: dns.ExtendedErrorCodeStaleAnswer,
		EDECachedError: dns.ExtendedErrorCodeCachedError, EDENotReady: dns.ExtendedErrorCodeNotReady,
		EDEStaleNXDomain: dns.ExtendedErrorCodeStaleNXDOMAINAnswer, EDENoReachable: dns.ExtendedErrorCodeNoReachableAuthority,
		EDENetworkError: dns.ExtendedErrorCodeNetworkError, EDEInvalidData: dns.ExtendedErrorCodeInvalidData,
		EDESynthesized: dns.ExtendedErrorCodeSynthesized,
	}
	for n, want := range edes {
		if n != want {
			t.Errorf("extended error %d should be %d", n, want)
		}
	}
}
