package iptables

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// TestEveryDatagramCounts: whether looking a client up counts (Linux 5.7) or it
// is put into the set anew, every datagram counts once; of a connection only the
// attempt does.
func TestEveryDatagramCounts(t *testing.T) {
	const datagrams, segments = 20, 5
	l := labtest.New(t)
	pod := labtest.AddPod(t, l, "client")
	var s *Sockets
	in(t, l.Node.Namespace, func() (err error) {
		s, err = Listen(t.Context(), vip4, ListenConfig{})
		return err
	})
	defer s.Close()
	for _, lookupCounts := range []bool{true, false} {
		for _, bypassing := range []bool{false, true} {
			t.Run(fmt.Sprintf("lookup counts %v, bypassing %v", lookupCounts, bypassing), func(t *testing.T) {
				rs := mustRuleSet(t, withProbe(clusterIPConfig()))
				rs.lookupCounts, rs.bypassing = lookupCounts, bypassing
				table := rs.process(false)
				in(t, l.Node.Namespace, func() error { return arrange(rs, &table, false) })

				udp, err := pod.Dial(t.Context(), "udp", vip4.String())
				if err != nil {
					t.Fatal(err)
				}
				defer udp.Close()
				for range datagrams {
					if _, err := udp.Write(rs.cfg.Probe); err != nil {
						t.Fatal(err)
					}
				}
				tcp, err := pod.Dial(t.Context(), "tcp", vip4.String())
				if err != nil {
					t.Fatal(err)
				}
				defer tcp.Close()
				conn, err := s.TCP[0].AcceptTCP()
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				buf := make([]byte, 512)
				for range segments {
					if _, err := tcp.Write(rs.cfg.Probe); err != nil {
						t.Fatal(err)
					}
					if _, err := conn.Read(buf); err != nil {
						t.Fatal(err)
					}
				}
				read := func(c *net.UDPConn) netip.Addr {
					if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
						t.Fatal(err)
					}
					_, from, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						t.Fatalf("a datagram does not arrive: %v", err)
					}
					return from.Addr()
				}
				for range datagrams {
					if from := read(s.UDP[0]); from != pod.IP4 {
						t.Fatalf("a datagram from %v", from)
					}
				}
				var got map[Client]uint64
				in(t, l.Node.Namespace, func() (err error) {
					got, err = new(nftKernel).taken()
					return err
				})
				if n := got[Client{pod.IP4, UDP}]; n != datagrams {
					t.Errorf("%d of %d datagrams count", n, datagrams)
				}
				if n := got[Client{pod.IP4, TCP}]; n != 1 {
					t.Errorf("one connection counts %d times", n)
				}
			})
		}
	}
}

func TestReleaseSince(t *testing.T) {
	for release, want := range map[string]bool{
		"5.6.19": false, "5.7.0": true, "5.7": true, "5.10.0-28-amd64": true, "4.18.0-553.el8_10.x86_64": false,
		"6.1.0-18-amd64": true, "6.18.44-fc-v769": true, "": false, "unknown": false,
	} {
		if got := releaseSince(release, 5, 7); got != want {
			t.Errorf("%q since 5.7: %v, want %v", release, got, want)
		}
	}
}
