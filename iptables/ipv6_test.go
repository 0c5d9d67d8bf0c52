package iptables

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// disableIPv6 takes IPv6 from a node or gives it back. The kernel removes every
// IPv6 route, and adds none meanwhile.
func disableIPv6(t *testing.T, ns *lab.Namespace, value string) {
	t.Helper()
	command(t, ns, "", "sh", "-c", "for c in all lo; do echo "+value+" >/proc/sys/net/ipv6/conf/$c/disable_ipv6; done")
}

// TestIPv6Disabled disables IPv6 under a process that takes both families: IPv4
// is repaired, changed and withdrawn as ever.
func TestIPv6Disabled(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			a, cfg := v.takeClusterIPs(t, s.Node.Namespace)
			disableIPv6(t, s.Node.Namespace, "1")
			a.await(RepairFailed, 1)
			a.await(Withdrawn, 2) // IPv6, since nothing answers

			a.call("Withdraw", "4", nil)
			wantFrom(t, s.pod.Namespace, "udp", vip4, false)
			wantFrom(t, s.pod.Namespace, "tcp", vip4, false)
			a.call("Restore", "4", nil)
			a.awaitTaking(6)
			wantFrom(t, s.pod.Namespace, "udp", vip4, true)

			moved := cfg.Targets
			moved.Addresses = []netip.AddrPort{link4, vip4, vip6}
			a.call("Apply", moved, nil)
			command(t, s.Node.Namespace, "", "ip", "route", "flush", "table", "5353")
			within(t, 5*slack*time.Second, "taking", func() bool { return a.stats().Active[vip4.String()] })
			within(t, 5*slack*time.Second, "repair", func() bool {
				_, err := tryCommand(t, s.Node.Namespace, "", "ip", "route", "get", link4.Addr().String(), "mark", "0x10", "fibmatch")
				return err == nil && strings.Count(command(t, s.Node.Namespace, "", "ip", "route", "show", "table", "5353"), "local") == 2
			})

			disableIPv6(t, s.Node.Namespace, "0")
			defer func() {
				if t.Failed() {
					t.Logf("state: %+v", a.stats())
				}
			}()
			within(t, 20*slack*time.Second, "IPv6", func() bool {
				st := a.stats()
				return st.Active[vip6.String()] && !strings.Contains(strings.Join(st.Problems, " "), "disable_ipv6")
			})
		})
	}
}

// TestStartWithoutIPv6 says what to do.
func TestStartWithoutIPv6(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	disableIPv6(t, ns, "1")
	var problem *agentProblem
	_, err := tryAgent(t, ns, agentConfig{Config: clusterIPConfig()})
	if !errors.As(err, &problem) || problem.Key != "listen" || !strings.Contains(problem.Text, "net.ipv6.conf.lo.disable_ipv6") {
		t.Errorf("with an IPv6 address: %v", err)
	}
	cfg := clusterIPConfig()
	cfg.Addresses, cfg.ClusterIPs = cfg.Addresses[:1], cfg.ClusterIPs[:1]
	startAgent(t, ns, agentConfig{Config: cfg}).awaitTaking(2)
}
