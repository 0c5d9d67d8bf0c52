package iptables

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// scene is a node with a client pod and two DNS pods behind kube-proxy.
type scene struct {
	*lab.Lab
	pod *lab.Pod
	dns []*lab.DNSPod
}

func newScene(t *testing.T) *scene {
	t.Helper()
	l := labtest.New(t)
	s := &scene{Lab: l, pod: labtest.AddPod(t, l, "client")}
	s.dns = labtest.AddDNS(t, l, "dns-a", "dns-b")
	return s
}

// clusterIPConfig intercepts both ClusterIPs.
func clusterIPConfig() Config {
	return Config{Targets: Targets{Addresses: []netip.AddrPort{vip4, vip6}, ClusterIPs: clusterIPs()}}
}

// ask asks once and returns the address in the answer.
func ask(t *testing.T, ns *lab.Namespace, network string, server netip.AddrPort) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	m, err := lab.Ask(ctx, ns, network, server, "www.example.com", dns.TypeA)
	if err != nil {
		return "", err
	}
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok {
			return a.A.String(), nil
		}
	}
	return m.String(), nil
}

// wantFrom asserts who answers: us, or kube-proxy's endpoints.
func wantFrom(t *testing.T, ns *lab.Namespace, network string, server netip.AddrPort, us bool) {
	t.Helper()
	got, err := ask(t, ns, network, server)
	if err != nil {
		t.Errorf("ask %v over %s from %v: %v", server, network, ns, err)
		return
	}
	if (got == answerFrom.String()) != us {
		t.Errorf("%v over %s from %v was answered %s; want it from us: %v", server, network, ns, got, us)
	}
}

func networks() []string { return []string{"udp", "tcp"} }

func TestIntercept(t *testing.T) {
	s := newScene(t)
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: testConfig(), Sockets: 2})
	a.awaitTaking(8)
	st := a.stats()
	t.Logf("backend %s: %s", st.Backend, st.Reason)
	for _, network := range networks() {
		for _, server := range []netip.AddrPort{vip4, vip6, link4, link6} {
			wantFrom(t, s.pod.Namespace, network, server, true)
			wantFrom(t, s.Node.Namespace, network, server, true)
		}
	}
	if udp, tcp := s.dns[0].Server.Total(); udp+tcp > 0 {
		t.Errorf("kube-proxy's endpoint was asked %d times", udp+tcp)
	}
	table := command(t, s.Node.Namespace, "", "nft", "list", "table", "inet", "dnsguard")
	if !strings.Contains(table, "flags owner") {
		t.Errorf("the table has no owner:\n%s", table)
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		if flows := command(t, s.Node.Namespace, "", "conntrack", "-L", "-f", family); strings.Contains(flows, "port=53 ") {
			t.Errorf("flows of clients are tracked:\n%s", flows)
		}
	}
	a.kill()
	for _, network := range networks() {
		for _, server := range []netip.AddrPort{vip4, vip6, link4, link6} {
			wantFrom(t, s.pod.Namespace, network, server, false)
			wantFrom(t, s.Node.Namespace, network, server, false)
		}
	}
}
