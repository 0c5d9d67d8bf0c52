package main

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// startWorld serves an address for one name, and knows of no other.
func startWorld(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetRcode(q, dns.RcodeNameError)
		m.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}, Ns: "ns.", Mbox: "h.", Minttl: 60}}
		if q.Question[0].Name == name {
			m.Rcode, m.Ns = dns.RcodeSuccess, nil
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, 2, 7)}}
		}
		_ = w.WriteMsg(m)
	})}
	done := make(chan error)
	go func() { done <- s.ActivateAndServe() }()
	t.Cleanup(func() {
		_ = s.Shutdown()
		<-done
	})
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// TestWalkPages: what walks there were, by kind and result, and what they spared
// clients, is on /metrics, and on /statusz in both forms.
func TestWalkPages(t *testing.T) {
	r := start(t, startWorld(t, "api.example.com."))
	for _, name := range []string{"api.example.com.shop.svc.cluster.local.", "nowhere.example.com.shop.svc.cluster.local."} {
		m, _, err := new(dns.Client).Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), r.listen.String())
		if err != nil {
			t.Fatal(err)
		}
		if found := m.Rcode == dns.RcodeSuccess && len(m.Answer) == 2; found != strings.HasPrefix(name, "api") {
			t.Fatalf("%s: %v", name, m)
		}
	}
	metrics, err := r.page("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`dnsguard_search_walks_total{kind="collapse",result="answered"} 1`,
		`dnsguard_search_walks_total{kind="collapse",result="nxdomain"} 1`,
		`dnsguard_search_walks_total{kind="collapse",result="error"} 0`,
		`dnsguard_search_walks_total{kind="expand",result="answered"} 0`,
		`dnsguard_search_saved_total 3`,
	} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("/metrics has no line %s", want)
		}
	}
	text, err := r.page("/statusz")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"search walks", "collapse/answered 1", "collapse/nxdomain 1", "3 questions saved"} {
		if !strings.Contains(text, want) {
			t.Errorf("/statusz does not say %q:\n%s", want, text)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.http+"/statusz", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var s struct {
		Search struct {
			Walks map[string]uint64
			Saved uint64 `json:"questionsSaved"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		t.Fatal(err)
	}
	if w := s.Search.Walks; len(w) != 6 || w["collapse/answered"] != 1 || w["collapse/nxdomain"] != 1 || s.Search.Saved != 3 {
		t.Errorf("/statusz in JSON: %+v", s.Search)
	}
}
