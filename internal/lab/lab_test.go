package lab_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

const (
	echo = "echo.default.svc.cluster.local"
	// enough is far more than any answer in a laboratory takes.
	enough = 5 * time.Second
	// brief is for queries that must not be answered: long enough for an ICMP
	// error or an answer to come, on a busy machine too.
	brief = 300 * time.Millisecond
)

// ask asks once for an address record.
func ask(t *testing.T, ns *lab.Namespace, network string, server netip.AddrPort, name string, timeout time.Duration) (*dns.Msg, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return lab.Ask(ctx, ns, network, server, name, dns.TypeA)
}

// mustAsk asks and wants an answer with data.
func mustAsk(t *testing.T, ns *lab.Namespace, network string, server netip.AddrPort, name string) *dns.Msg {
	t.Helper()
	m, err := ask(t, ns, network, server, name, enough)
	if err != nil {
		t.Fatal(err)
	}
	if m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0 {
		t.Fatalf("answer to %s:\n%v", name, m)
	}
	return m
}

// eachFamily runs a subtest per address family that the laboratory has.
func eachFamily(t *testing.T, l *lab.Lab, f func(t *testing.T, is4 bool)) {
	t.Helper()
	t.Run("ipv4", func(t *testing.T) { f(t, true) })
	if l.IPv6 {
		t.Run("ipv6", func(t *testing.T) { f(t, false) })
	}
}

// endpoint returns the pod's port 53 in a family.
func endpoint(p *lab.Pod, is4 bool) netip.AddrPort {
	for _, e := range p.Endpoints() {
		if e.Addr().Is4() == is4 {
			return e
		}
	}
	return netip.AddrPort{}
}

// Everything that must reach a pod's server does: from another pod and from
// the node, over both transports and families, directly and by the Service.
func TestReach(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	dnsPod := labtest.AddDNS(t, l, "dns-a")[0]
	client := labtest.AddPod(t, l, "client")
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		for _, from := range []*lab.Namespace{client.Namespace, l.Node.Namespace} {
			for _, network := range []string{"udp", "tcp"} {
				for _, server := range []netip.AddrPort{endpoint(dnsPod.Pod, is4), l.DNS.Addr(is4)} {
					mustAsk(t, from, network, server, echo)
				}
			}
		}
	})
}

// A pod reaches a listening address that the node has on its loopback device.
func TestNodeAddress(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	client := labtest.AddPod(t, l, "client")
	addrs := []netip.Addr{netip.MustParseAddr("169.254.20.10")}
	if l.IPv6 {
		addrs = append(addrs, netip.MustParseAddr("fd53:dd:20::10"))
	}
	for _, addr := range addrs {
		if err := l.Node.AddAddress(addr); err != nil {
			t.Fatal(err)
		}
		server := netip.AddrPortFrom(addr, 53)
		s, err := lab.NewDNSServer(t.Context(), l.Node.Namespace, []*lab.Zone{lab.ClusterZone()}, server)
		if err != nil {
			t.Fatal(err)
		}
		mustAsk(t, client.Namespace, "udp", server, echo)
		mustAsk(t, client.Namespace, "tcp", server, echo)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A dead process in a living pod refuses; a pod that is gone is silent. That
// difference makes the incident.
func TestDeadProcessRefusesDeadPodIsSilent(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	if err := pods[0].Server.Close(); err != nil {
		t.Fatal(err)
	}
	if err := pods[1].Kill(); err != nil {
		t.Fatal(err)
	}
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		for _, from := range []*lab.Namespace{client.Namespace, l.Node.Namespace} {
			for _, network := range []string{"udp", "tcp"} {
				if _, err := ask(t, from, network, endpoint(pods[0].Pod, is4), echo, enough); !errors.Is(err, lab.ErrRefused) {
					t.Errorf("%v over %s, dead process: %v, want ErrRefused", from, network, err)
				}
				if _, err := ask(t, from, network, endpoint(pods[1].Pod, is4), echo, brief); !errors.Is(err, lab.ErrTimeout) {
					t.Errorf("%v over %s, dead pod: %v, want ErrTimeout", from, network, err)
				}
			}
		}
	})
}

// The gateway swallows whatever is not on the node, and sends no ICMP error,
// not even those that a socket would not show.
func TestGatewayIsSilent(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	client := labtest.AddPod(t, l, "client")
	servers := []string{"192.0.2.1:53"}
	if l.IPv6 {
		servers = append(servers, "[2001:db8::1]:53")
	}
	// From the node too: the gateway has no route to a pod to send an error on.
	for _, from := range []*lab.Namespace{client.Namespace, l.Node.Namespace} {
		for _, server := range servers {
			if _, err := ask(t, from, "udp", netip.MustParseAddrPort(server), echo, brief); !errors.Is(err, lab.ErrTimeout) {
				t.Errorf("from %v, %s: %v, want ErrTimeout", from, server, err)
			}
		}
	}
	err := l.Gateway.Do(func() error {
		v4, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		var icmp [][]string // a line of names, a line of values
		for line := range strings.Lines(string(v4)) {
			if strings.HasPrefix(line, "Icmp: ") {
				icmp = append(icmp, strings.Fields(line))
			}
		}
		if i := slices.Index(icmp[0], "OutDestUnreachs"); i < 0 || icmp[1][i] != "0" {
			t.Errorf("IPv4: %v", icmp)
		}
		v6, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if l.IPv6 && (err != nil || !regexp.MustCompile(`(?m)^Icmp6OutDestUnreachs\s+0$`).Match(v6)) {
			t.Errorf("IPv6: %s (%v)", v6, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
