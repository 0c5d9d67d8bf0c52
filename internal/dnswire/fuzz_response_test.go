package dnswire

import (
	"bytes"
	"slices"
	"testing"

	"github.com/miekg/dns"
)

// seedAnswers are answers of all shapes and types.
func seedAnswers(t testing.TB) [][]byte {
	var msgs [][]byte
	for _, msg := range plainAnswers(t) {
		msgs = append(msgs, msg)
	}
	slices.SortFunc(msgs, bytes.Compare)
	return append(msgs,
		answer{tc: true, an: []string{"www.example. A 192.0.2.1"}}.pack(t),
		answer{rcode: dns.RcodeServerFailure, edns: true, optionsInReply: []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: 22, ExtraText: "x"}}}.pack(t),
		answer{rcode: 23, edns: true, optFirst: true, ar: []string{"x. A 192.0.2.1"}}.pack(t),
		header(fQR|RcodeRefused, 1, 0, 0, 1),
		answer{qtype: TypeANY, an: []string{
			"www.example. AAAA 2001:db8::1", "www.example. CNAME a.example.", "www.example. DNAME a.example.",
			"www.example. MX 1 m.example.", "www.example. SRV 1 2 3 s.example.", "www.example. PTR p.example.",
			"www.example. MB a.example.", "www.example. MG a.example.", "www.example. MR a.example.",
			"www.example. MD a.example.", "www.example. MF a.example.",
		}}.pack(t),
		answer{qtype: TypeANY, an: []string{
			"www.example. HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1", "www.example. CAA 0 issue ca.example.",
			"www.example. NAPTR 1 2 \"u\" \"x\" \"!a!b!\" r.example.", "www.example. DS 1 13 2 AAAA", "www.example. RP a.example. b.example.",
			`www.example. HINFO "RFC8482" ""`, "www.example. TLSA 3 1 1 AAAA",
		}}.pack(t),
	)
}

func FuzzParseResponse(f *testing.F) {
	for _, msg := range seedAnswers(f) {
		f.Add(msg)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		msg := exact(data)
		var r Response
		err := ParseResponse(msg, &r)
		if !bytes.Equal(msg, data) {
			t.Fatal("the message was changed")
		}
		if err == nil {
			checkResponse(t, msg, &r)
		}
		checkRepackedResponse(t, msg)
	})
}

// checkResponse checks an accepted answer against miekg/dns.
func checkResponse(t *testing.T, msg []byte, r *Response) {
	t.Helper()
	// Of a bare header and of an answer with TC set what was read counts, not
	// what the header says. For all others the two must be the same.
	var counts [3]uint16
	for i := range r.Records {
		counts[r.Records[i].Section]++
	}
	if r.EDNS {
		counts[Additional]++
	}
	qd := min(1, uint16(r.NameLen))
	whole := exact(msg[:r.End])
	SetCounts(whole, qd, counts[0], counts[1], counts[2])
	if !bytes.Equal(whole, msg[:r.End]) && r.Flags&FlagTC == 0 && len(msg) > HeaderLen {
		t.Fatalf("header %x, but read were %v", msg[:HeaderLen], counts)
	}

	off := HeaderLen
	if r.NameLen > 0 {
		off += r.NameLen + 4
	}
	rrs, err := plainWalk(whole, off, int(counts[0])+int(counts[1])+int(counts[2]))
	if err != nil {
		t.Fatalf("accepted, but its records: %v", err)
	}
	checkRecords(t, whole, r, rrs)

	summary := r.Classify(msg)
	m := new(dns.Msg)
	if err := m.Unpack(whole); err != nil {
		// RDATA and EDNS options that are not checked here.
		if !r.Unchecked {
			t.Fatalf("accepted, but miekg/dns: %v", err)
		}
		return
	}
	if m.Id != r.ID || !m.Response || m.Opcode != 0 || m.Rcode != int(r.Rcode) || m.Truncated != (r.Flags&FlagTC != 0) {
		t.Fatalf("header: %+v, miekg/dns: %+v", r, m.MsgHdr)
	}
	if len(m.Question) != int(qd) || len(m.Answer) != int(counts[0]) || len(m.Ns) != int(counts[1]) || len(m.Extra) != int(counts[2]) {
		t.Fatalf("counts: %d %v, miekg/dns: %v", qd, counts, m)
	}
	if qd == 1 && (m.Question[0].Qtype != r.Type || m.Question[0].Qclass != r.Class ||
		!bytes.Equal(packName(t, m.Question[0].Name), msg[HeaderLen:HeaderLen+r.NameLen])) {
		t.Fatalf("question: %+v, miekg/dns: %v", r, m.Question)
	}
	o := m.IsEdns0()
	if (o != nil) != r.EDNS || o != nil && (o.Do() != r.DO || max(512, o.UDPSize()) != r.UDPSize) {
		t.Fatalf("OPT: %+v, miekg/dns: %v", r, o)
	}
	decoded := slices.DeleteFunc(slices.Concat(m.Answer, m.Ns, m.Extra), func(rr dns.RR) bool { return rr.Header().Rrtype == TypeOPT })
	for i := range r.Records {
		checkRDataOf(t, msg, &r.Records[i], decoded[i])
	}
	if want := plainClassify(m); summary != want {
		t.Fatalf("summary %+v, want %+v", summary, want)
	}
}

// checkRecords compares the records with those of a plain walk.
func checkRecords(t *testing.T, msg []byte, r *Response, rrs []plainRR) {
	t.Helper()
	if k := len(rrs); k > 0 && rrs[k-1].end != r.End {
		t.Fatalf("End = %d, want %d", r.End, rrs[k-1].end)
	}
	i := 0
	for k, rr := range rrs {
		if rr.typ == TypeOPT {
			if !r.EDNS || r.OPTOff != rr.off || r.OPTEnd != rr.end || r.OPTLast != (k == len(rrs)-1) {
				t.Fatalf("OPT: %+v, want %+v", r, rr)
			}
			continue
		}
		rec := &r.Records[i]
		data := rr.end - len(rr.rdata)
		if rec.Off != rr.off || rec.End != rr.end || rec.DataOff != data || rec.TTLOff != data-6 || rec.Type != rr.typ || rec.Class != rr.class {
			t.Fatalf("record %d: %+v, want %+v", i, rec, rr)
		}
		if ttl := rec.TTL(msg); ttl != rr.ttl && (ttl != 0 || rr.ttl < 1<<31) {
			t.Fatalf("record %d: TTL %d, want %d", i, ttl, rr.ttl)
		}
		if got, want := AppendName(nil, msg, rec.Off), lower(packName(t, rr.name)); !bytes.Equal(got, want) {
			t.Fatalf("record %d: owner %q, want %q", i, got, want)
		}
		i++
	}
	if i != len(r.Records) {
		t.Fatalf("%d records, want %d", len(r.Records), i)
	}
}

// checkRDataOf compares the RDATA of a checked type with what miekg/dns makes of
// it. Unchecked types are miekg/dns's own business.
func checkRDataOf(t *testing.T, msg []byte, rec *Record, rr dns.RR) {
	t.Helper()
	rdata := msg[rec.DataOff:rec.End]
	var names []string
	skip := 0
	switch rr := rr.(type) {
	case *dns.A:
		if !bytes.Equal(rdata, rr.A) {
			t.Fatalf("A %x, miekg/dns: %v", rdata, rr)
		}
	case *dns.AAAA:
		if !bytes.Equal(rdata, rr.AAAA) {
			t.Fatalf("AAAA %x, miekg/dns: %v", rdata, rr)
		}
	case *dns.TXT:
		b := make([]byte, dns.Len(rr)+1)
		n, err := dns.PackRR(rr, b, 0, nil, false)
		if err != nil || !bytes.HasSuffix(b[:n], rdata) {
			t.Fatalf("TXT %x, miekg/dns: %x, %v", rdata, b[:n], err)
		}
	case *dns.NS:
		names = []string{rr.Ns}
	case *dns.CNAME:
		names = []string{rr.Target}
	case *dns.PTR:
		names = []string{rr.Ptr}
	case *dns.DNAME:
		names = []string{rr.Target}
	case *dns.MB:
		names = []string{rr.Mb}
	case *dns.MD:
		names = []string{rr.Md}
	case *dns.MF:
		names = []string{rr.Mf}
	case *dns.MG:
		names = []string{rr.Mg}
	case *dns.MR:
		names = []string{rr.Mr}
	case *dns.MX:
		names, skip = []string{rr.Mx}, 2
	case *dns.SRV:
		names, skip = []string{rr.Target}, 6
	case *dns.SOA:
		names = []string{rr.Ns, rr.Mbox}
		if want := wire(rr.Serial, rr.Refresh, rr.Retry, rr.Expire, rr.Minttl); !bytes.HasSuffix(rdata, want) {
			t.Fatalf("SOA %x, miekg/dns: %v", rdata, rr)
		}
	default:
		return
	}
	off := rec.DataOff + skip
	for _, name := range names {
		if got, want := AppendName(nil, msg, off), lower(packName(t, name)); !bytes.Equal(got, want) {
			t.Fatalf("%v: name %q in RDATA, miekg/dns: %q", rr, got, want)
		}
		off, _ = nameEnd(msg[:rec.End], off)
	}
}

// checkRepackedResponse checks that an answer which miekg/dns reads and writes
// again is accepted, if it is one.
func checkRepackedResponse(t *testing.T, data []byte) {
	t.Helper()
	m := new(dns.Msg)
	if m.Unpack(data) != nil || !m.Response || m.Opcode != 0 || len(m.Question) != 1 {
		return
	}
	for i, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
		h := rr.Header()
		if h.Rrtype == TypeOPT && (i < len(m.Answer)+len(m.Ns) || rr != dns.RR(m.IsEdns0()) || h.Name != ".") {
			return // two of them, or misplaced
		}
		// miekg/dns takes RDATA that is empty or ends behind any field, as
		// dynamic updates use it (RFC 2136). In an answer it is malformed.
		if h.Rdlength == 0 {
			return
		}
		switch rr := rr.(type) {
		case *dns.MX:
			if rr.Mx == "" {
				return
			}
		case *dns.SRV:
			if rr.Target == "" {
				return
			}
		case *dns.SOA:
			// All fields behind the names default to 0, so look at the
			// length: miekg/dns packs them whether they were there or not.
			if rr.Mbox == "" {
				return
			}
		}
	}
	for _, m.Compress = range []bool{false, true} {
		b, err := m.Pack()
		if err != nil || len(b) > MaxMsgLen {
			return
		}
		r := new(Response)
		if err := ParseResponse(exact(b), r); err != nil {
			t.Fatalf("%v: refused is what miekg/dns packs: %x", err, b)
		}
		checkResponse(t, b, r)
	}
}
