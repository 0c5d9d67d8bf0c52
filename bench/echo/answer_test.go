package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func TestAnswer(t *testing.T) {
	for _, tt := range []struct {
		name  string
		qtype uint16
		edns  bool
		want  []string // answer and authority
	}{
		{"address", dns.TypeA, false, []string{"a.example.\t60\tIN\tA\t192.0.2.1"}},
		{"address with EDNS", dns.TypeA, true, []string{"a.example.\t60\tIN\tA\t192.0.2.1"}},
		{"no data", dns.TypeAAAA, false, []string{".\t60\tIN\tSOA\t. . 1 3600 600 86400 60"}},
		{"no data with EDNS", dns.TypeMX, true, []string{".\t60\tIN\tSOA\t. . 1 3600 600 86400 60"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			query := new(dns.Msg).SetQuestion("a.example.", tt.qtype)
			if tt.edns {
				query.SetEdns0(4096, true)
			}
			buf := make([]byte, 1232)
			packed, err := query.PackBuffer(buf)
			if err != nil {
				t.Fatal(err)
			}
			n := answerer(60)(buf, len(packed))
			got := new(dns.Msg)
			if err := got.Unpack(buf[:n]); err != nil {
				t.Fatal(err)
			}
			var records []string
			for _, rr := range append(got.Answer, got.Ns...) {
				records = append(records, rr.String())
			}
			if diff := cmp.Diff(tt.want, records); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(query.Question, got.Question); diff != "" {
				t.Error(diff)
			}
			if got.Id != query.Id || !got.Response || !got.RecursionDesired || !got.RecursionAvailable || got.Rcode != dns.RcodeSuccess {
				t.Errorf("header %+v", got.MsgHdr)
			}
			if has := got.IsEdns0() != nil; has != tt.edns {
				t.Errorf("answer has OPT: %v, query: %v", has, tt.edns)
			}
		})
	}
}

func FuzzAnswer(f *testing.F) {
	query, err := new(dns.Msg).SetQuestion("a.example.", dns.TypeA).SetEdns0(1232, false).Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(query)
	f.Add(query[:12])
	f.Add([]byte("\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x3f"))
	f.Add([]byte("\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00" + strings.Repeat("\x01a", 128) + "\x00\x00\x01\x00\x01"))
	answer := answerer(60)
	f.Fuzz(func(t *testing.T, query []byte) {
		const size = 1232
		if len(query) > size {
			return
		}
		buf := make([]byte, size)
		n := answer(buf, copy(buf, query))
		if n == 0 {
			return
		}
		if n > size {
			t.Fatalf("answer of %d bytes", n)
		}
		got := new(dns.Msg)
		if err := got.Unpack(buf[:n]); err != nil {
			t.Fatalf("answer % x to % x: %v", buf[:n], query, err)
		}
	})
}
