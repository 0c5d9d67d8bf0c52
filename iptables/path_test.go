package iptables

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// TestFamiliesWithdrawnAlone leaves each family to kube-proxy while the other
// is taken.
func TestFamiliesWithdrawnAlone(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			a, _ := v.takeClusterIPs(t, s.Node.Namespace)
			taking := 4
			for _, which := range []string{"4", "6"} {
				a.call("Withdraw", which, nil)
				for _, network := range networks() {
					wantFrom(t, s.pod.Namespace, network, vip4, which != "4")
					wantFrom(t, s.pod.Namespace, network, vip6, which != "6")
				}
				st := a.stats()
				if st.Active[vip4.String()] != (which != "4") || st.Active[vip6.String()] != (which != "6") {
					t.Errorf("family %s withdrawn, but active: %v", which, st.Active)
				}
				// Withdrawn stays withdrawn although answers still leave: the
				// probes of the other family, and what is asked by the mark.
				a.call("Restore", which, nil)
				taking += 2
				a.awaitTaking(taking)
				wantFrom(t, s.pod.Namespace, "udp", vip4, true)
				wantFrom(t, s.pod.Namespace, "udp", vip6, true)
			}
			if st := a.stats(); st.Withdrawals["test"] != 4 || len(st.Withdrawals) != 1 {
				t.Errorf("withdrawals: %v", st.Withdrawals)
			}
		})
	}
}

// TestWithdrawWithoutDescriptors: a process that can open no socket asks nobody, and
// has to leave queries to kube-proxy for that.
func TestWithdrawWithoutDescriptors(t *testing.T) {
	s := newScene(t)
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: clusterIPConfig()})
	a.awaitTaking(4)
	a.call("Starve", true, nil)
	a.call("Withdraw", "4", nil)
	wantFrom(t, s.pod.Namespace, "udp", vip4, false)
	a.call("Starve", false, nil)
	a.call("Restore", "4", nil)
	within(t, 20*slack*time.Second, "return", func() bool { return a.stats().Active[vip4.String()] })
	wantFrom(t, s.pod.Namespace, "udp", vip4, true)
}

// TestForeignMarksSurvive marks packets as kube-proxy and a CNI would before
// we see them, and looks for their bits where they are delivered.
func TestForeignMarksSurvive(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			command(t, s.Node.Namespace, `
				table inet foreign {
					chain prerouting { type filter hook prerouting priority -301; iifname != "lo" meta mark set 0x00ab4f00; }
					chain output { type filter hook output priority -301; udp dport 53 meta mark set meta mark | 0x00ab4f00; }
					chain input { type filter hook input priority 0; udp dport 53 meta mark 0x00ab4f10 counter; }
				}`, "nft", "-f", "-")
			cfg := v.config()
			a := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg, Path: v.path})
			a.awaitTaking(2 * len(cfg.Addresses))
			wantFrom(t, s.pod.Namespace, "udp", vip4, true)
			wantFrom(t, s.pod.Namespace, "udp", vip6, true)
			want := 2
			if v.backend == NFTables {
				wantFrom(t, s.Node.Namespace, "udp", vip4, true)
				wantFrom(t, s.Node.Namespace, "udp", vip6, true)
				want = 4
			}
			var packets int
			table := command(t, s.Node.Namespace, "", "nft", "list", "chain", "inet", "foreign", "input")
			_, rest, _ := strings.Cut(table, "counter packets ")
			if _, err := fmt.Sscan(rest, &packets); err != nil {
				t.Fatalf("no counter in %s", table)
			}
			if packets < want {
				t.Errorf("%d of %d packets arrived with the bits of others and ours", packets, want)
			}
		})
	}
}

// TestForeignDivert is what a transparent proxy's rules do to us: they find our
// sockets too, and lead what goes to them to this node, marked anew. That takes
// nothing from us, and with link-local addresses nothing from who is let past,
// since the fallback has rewritten the address by then.
func TestForeignDivert(t *testing.T) {
	s := newScene(t)
	command(t, s.Node.Namespace, `
		table inet foreign {
			chain prerouting { type filter hook prerouting priority mangle; iifname != "lo" socket transparent 1 meta mark set 0x200 counter; }
		}`, "nft", "-f", "-")
	command(t, s.Node.Namespace, "", "sh", "-c", "ip rule add pref 9 fwmark 0x200/0xf00 lookup 2004; ip route add local default dev lo table 2004")
	cfg := testConfig()
	cfg.Addresses = []netip.AddrPort{link4}
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg})
	a.awaitTaking(2)
	for _, taken := range []bool{true, false} {
		for _, network := range networks() {
			wantFrom(t, s.pod.Namespace, network, link4, taken)
			wantFrom(t, s.Node.Namespace, network, link4, taken)
			wantFrom(t, s.pod.Namespace, network, vip4, false)
		}
		if diverted := command(t, s.Node.Namespace, "", "nft", "list", "table", "inet", "foreign"); strings.Contains(diverted, "counter packets 0") {
			t.Errorf("nothing was diverted:\n%s", diverted)
		}
		a.call("Withdraw", "4", nil)
	}
}

// TestStrictReversePath sets what hardened nodes set, in every combination.
func TestStrictReversePath(t *testing.T) {
	s := newScene(t)
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: testConfig()})
	a.awaitTaking(8)
	command(t, s.Node.Namespace, `
		table inet rpfilter {
			chain prerouting { type filter hook prerouting priority -290; iifname != "lo" fib saddr . mark . iif oif missing drop; }
		}`, "nft", "-f", "-")
	for _, rp := range []string{"0", "1", "2"} {
		for _, valid := range []string{"0", "1"} {
			t.Run("rp_filter="+rp+",src_valid_mark="+valid, func(t *testing.T) {
				for _, dev := range []string{"all", "default", "lo", "eth0", "veth2"} {
					for key, value := range map[string]string{"rp_filter": rp, "src_valid_mark": valid} {
						if err := s.Node.Sysctl("net/ipv4/conf/"+dev+"/"+key, value); err != nil {
							t.Fatal(err)
						}
					}
				}
				for _, network := range networks() {
					for _, server := range []netip.AddrPort{vip4, vip6, link4, link6} {
						wantFrom(t, s.pod.Namespace, network, server, true)
						wantFrom(t, s.Node.Namespace, network, server, true)
					}
				}
			})
		}
	}
}

// TestClientThatCannotReachUs lets a pod past whose packets to this node a
// policy drops, and only that pod, over each transport.
func TestClientThatCannotReachUs(t *testing.T) {
	s := newScene(t)
	other := labtest.AddPod(t, s.Lab, "other")
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: clusterIPConfig(), Count: true})
	a.awaitTaking(4)
	for _, p := range []*lab.Pod{s.pod, other} {
		for _, network := range networks() {
			wantFrom(t, p.Namespace, network, vip4, true)
		}
	}
	command(t, s.Node.Namespace, `
		table inet firewall {
			chain input { type filter hook input priority 0; iifname "veth2" th dport 53 drop; }
		}`, "nft", "-f", "-")
	for i, c := range []struct {
		network string
		server  netip.AddrPort
		client  Client
	}{
		{"udp", vip4, Client{s.pod.IP4, UDP}},
		{"tcp", vip4, Client{s.pod.IP4, TCP}},
		{"udp", vip6, Client{s.pod.IP6, UDP}},
	} {
		if got, err := ask(t, s.pod.Namespace, c.network, c.server); err == nil {
			t.Fatalf("the policy lets %s pass: answered %s", c.network, got)
		}
		for start := time.Now(); ; {
			sendDatagram(t, s.pod.Namespace, c.server) // as for AAAA
			if _, err := ask(t, s.pod.Namespace, c.network, c.server); err == nil {
				break
			}
			if time.Since(start) > 10*time.Second {
				t.Fatalf("%v is still in the dark: %+v", c.client, a.stats())
			}
		}
		events := a.await(Bypassed, i+1)
		if got := events[i].Client; got != c.client {
			t.Errorf("bypassed %v, want %v", got, c.client)
		}
		wantFrom(t, s.pod.Namespace, c.network, c.server, false)
		wantFrom(t, other.Namespace, c.network, c.server, true)
	}
	if n := a.stats().Bypassed; n != 3 {
		t.Errorf("%d clients are bypassed, want 3", n)
	}
}

// TestExclude takes nothing from excluded clients, also after a change.
func TestExclude(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			other := labtest.AddPod(t, s.Lab, "other")
			cfg := clusterIPConfig()
			cfg.Backend = v.backend
			cfg.Exclude = []netip.Prefix{netip.PrefixFrom(s.pod.IP4, 32), netip.MustParsePrefix("192.0.2.0/24")}
			a := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg, Path: v.path})
			a.awaitTaking(4)
			for _, network := range networks() {
				wantFrom(t, s.pod.Namespace, network, vip4, false)
				wantFrom(t, s.pod.Namespace, network, vip6, true)
				wantFrom(t, other.Namespace, network, vip4, true)
			}
			cfg.Exclude = []netip.Prefix{netip.PrefixFrom(other.IP4, 32), netip.PrefixFrom(other.IP6, 128)}
			a.call("Apply", cfg.Targets, nil)
			for _, network := range networks() {
				wantFrom(t, s.pod.Namespace, network, vip4, true)
				wantFrom(t, other.Namespace, network, vip4, false)
				wantFrom(t, other.Namespace, network, vip6, false)
			}
		})
	}
}

// TestApply changes the addresses: what stays is taken without a gap.
func TestApply(t *testing.T) {
	s := newScene(t)
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: testConfig()})
	a.awaitTaking(8)
	cfg := testConfig()
	cfg.Addresses = []netip.AddrPort{vip4, link4}
	a.call("Apply", cfg.Targets, nil)
	wantFrom(t, s.pod.Namespace, "udp", vip4, true)
	wantFrom(t, s.pod.Namespace, "tcp", link4, true)
	wantFrom(t, s.pod.Namespace, "udp", vip6, false)
	rules := command(t, s.Node.Namespace, "", "ip", "-6", "rule", "show", "priority", "1")
	if rules != "" {
		t.Errorf("the rule of the family that went is left: %s", rules)
	}
	a.call("Apply", testConfig().Targets, nil)
	a.awaitTaking(8 + 4)
	for _, server := range []netip.AddrPort{vip4, vip6, link4, link6} {
		wantFrom(t, s.pod.Namespace, "udp", server, true)
	}
	if n := a.stats().Repairs; n != 0 {
		t.Errorf("%d repairs were counted for what we did ourselves", n)
	}
}

// TestFallback asks the link-local addresses when nobody takes them: over
// kube-proxy, apart from a flow that the same port has to the ClusterIP.
func TestFallback(t *testing.T) {
	s := newScene(t)
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: testConfig()})
	a.awaitTaking(8)
	a.kill()
	for _, ns := range []*lab.Namespace{s.pod.Namespace, s.Node.Namespace} {
		for _, pair := range [][2]netip.AddrPort{{link4, vip4}, {link6, vip6}} {
			for _, network := range networks() {
				wantFrom(t, ns, network, pair[0], false)
				wantFrom(t, ns, network, pair[1], false)
			}
			samePort(t, ns, pair)
		}
	}
	flows := command(t, s.Node.Namespace, "", "conntrack", "-L", "-p", "udp")
	flows += command(t, s.Node.Namespace, "", "conntrack", "-L", "-p", "udp", "-f", "ipv6")
	if n := strings.Count(flows, fmt.Sprintf("zone-orig=%d ", DefaultZone)); n == 0 || n == strings.Count(flows, "dport=53") {
		t.Errorf("%d flows are in the zone of the fallback:\n%s", n, flows)
	}
}

// samePort asks two servers from one source port, in turn.
func samePort(t *testing.T, ns *lab.Namespace, servers [2]netip.AddrPort) {
	t.Helper()
	c, err := ns.ListenPacket(t.Context(), "udp", netip.AddrPortFrom([]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[family(servers[0].Addr())], 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	query := append(probeQuery(), "\x03www\x07example\x03com\x00\x00\x01\x00\x01"...)
	query[5] = 1
	buf := make([]byte, 512)
	for i := range 6 {
		server := servers[i%2]
		query[1] = byte(i)
		if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.WriteTo(query, net.UDPAddrFromAddrPort(server)); err != nil {
			t.Fatal(err)
		}
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			t.Errorf("query %d to %v: %v", i, server, err)
			continue
		}
		if got := from.(*net.UDPAddr).AddrPort(); netip.AddrPortFrom(got.Addr().Unmap(), got.Port()) != server || n < 12 || buf[1] != byte(i) {
			t.Errorf("query %d to %v was answered by %v", i, server, got)
		}
	}
}

// TestForeignRule reports a routing rule that sorts before ours.
func TestForeignRule(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	cfg := clusterIPConfig()
	cfg.RulePriority = 20
	a := startAgent(t, ns, agentConfig{Config: cfg})
	a.awaitTaking(4)
	command(t, ns, "", "ip", "rule", "add", "priority", "10", "iif", "lo", "lookup", "77")
	command(t, ns, "", "ip", "rule", "add", "priority", "30", "iif", "lo", "lookup", "78")
	events := a.await(ForeignRule, 1)
	if want := "10: from all iif lo lookup 77"; events[0].Detail != want || len(events) != 1 {
		t.Errorf("reported %+v, want %q", events, want)
	}
	if st := a.stats(); len(st.Foreign) != 1 {
		t.Errorf("foreign rules: %v", st.Foreign)
	}
}

// TestPodsBehindABridge is how flannel, k3s and kind connect pods. With
// bridge-nf-call-iptables, as Kubernetes asks for, packets meet the rules while
// they still cross the bridge.
func TestPodsBehindABridge(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			command(t, s.Node.Namespace, "", "sh", "-ec", `
				ip link add cni0 type bridge
				ip link set veth2 master cni0
				ip link set cni0 up
				ip addr flush dev veth2
				ip addr add 10.244.0.1/32 dev cni0
				ip route replace 10.244.0.2/32 dev cni0
				ip -6 addr add fd00:10:244::1/128 dev cni0 nodad
				ip -6 route replace fd00:10:244::2/128 dev cni0`)
			cfg := v.config()
			a := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg, Path: v.path})
			a.awaitTaking(2 * len(cfg.Addresses))
			check := func(us bool) {
				for _, network := range networks() {
					for _, server := range cfg.Addresses {
						wantFrom(t, s.pod.Namespace, network, server, us)
					}
				}
			}
			for _, call := range []string{"0", "1"} {
				for _, key := range []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"} {
					if err := s.Node.Sysctl(key, call); err != nil {
						t.Fatal(err)
					}
				}
				check(true)
			}
			a.kill()
			check(false)
		})
	}
}
