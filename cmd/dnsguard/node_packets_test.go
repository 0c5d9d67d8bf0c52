package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// podMTU is what a tunnel may leave, and the least that IPv6 has.
const podMTU = 1280

// TestNodePackets: queries in forms that firewalls stumble over are taken and answered
// as others are: in fragments, with IP options, with extension headers before UDP, over a
// path with a smaller MTU, and beside ICMP errors about answers to clients that are gone.
func TestNodePackets(t *testing.T) {
	n := newNode(t)
	d := n.start("a")
	defer d.stop()
	err := n.pod.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, podMTU)
	})
	if err != nil {
		t.Fatal(err)
	}
	const fragmented = podMTU + 500
	option := func(level, name int, value string) func(fd int) error {
		return func(fd int) error { return unix.SetsockoptString(fd, level, name, value) }
	}
	allowFragments := func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
	}
	nops := option(unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x00")
	padding := "\x00\x00\x01\x04\x00\x00\x00\x00" // a header of 8 octets with PadN (RFC 8200, 4.2)
	tests := []struct {
		name   string
		server netip.AddrPort
		size   int
		set    func(fd int) error
	}{
		{"IPv4, fragments", clusterIP4, fragmented, allowFragments},
		{"IPv4, options", clusterIP4, 100, nops},
		{"IPv4, options and fragments", clusterIP4, fragmented, func(fd int) error {
			return errors.Join(nops(fd), allowFragments(fd))
		}},
		{"IPv6, fragments", clusterIP6, fragmented, nil},
		{"IPv6, destination options", clusterIP6, 100, option(unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, padding)},
		{"IPv6, hop-by-hop options", clusterIP6, 100, option(unix.IPPROTO_IPV6, unix.IPV6_HOPOPTS, padding)},
		// Both at once Linux delivers to no local socket where flows are tracked.
	}
	for _, tt := range tests {
		if tt.server.Addr().Is6() && !n.IPv6 {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			before := d.metric("dnsguard_queries_total")
			if err := oddQuery(t.Context(), n.pod, tt.server, tt.size, tt.set); err != nil {
				t.Error(err)
			}
			if d.metric("dnsguard_queries_total") == before {
				t.Error("not taken")
			}
		})
	}
	t.Run("clients that are gone", func(t *testing.T) {
		for range 100 {
			// The answer meets a closed port.
			if err := oddQuery(t.Context(), n.pod, clusterIP4, 0, nil); err != nil {
				t.Fatal(err)
			}
		}
		if !n.taken(n.pod, clusterIP4) {
			t.Error("not taken")
		}
	})
	if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") {
		t.Errorf("/readyz: %s", page)
	}
}

// oddQuery asks for cachedName in a query padded to a size, from a socket with options;
// with size 0 it closes the socket before the answer can come.
func oddQuery(ctx context.Context, from *lab.Pod, server netip.AddrPort, size int, set func(fd int) error) error {
	m := new(dns.Msg).SetQuestion(cachedName, dns.TypeA)
	pad := &dns.EDNS0_PADDING{}
	m.SetEdns0(1232, false)
	m.IsEdns0().Option = append(m.IsEdns0().Option, pad)
	pad.Padding = make([]byte, max(0, size-m.Len()))
	query, err := m.Pack()
	if err != nil {
		return err
	}
	var conn net.Conn
	err = from.Do(func() error {
		dialer := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if set == nil {
				return nil
			}
			return errors.Join(raw.Control(func(fd uintptr) { err = set(int(fd)) }), err)
		}}
		conn, err = dialer.DialContext(ctx, "udp", server.String())
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write(query); err != nil || size == 0 {
		return err
	}
	_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second))
	reply := make([]byte, 4096)
	k, err := conn.Read(reply)
	if err != nil {
		return err
	}
	got := new(dns.Msg)
	if err := got.Unpack(reply[:k]); err != nil {
		return err
	}
	if len(got.Answer) == 0 {
		return errors.New("an empty answer: " + got.String())
	}
	return nil
}
