package iptables

import (
	"errors"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// ruleSets are the rule sets that have golden files.
func ruleSets() map[string]Config {
	clusterIP := testConfig()
	clusterIP.Targets = Targets{Addresses: []netip.AddrPort{vip4}, ClusterIPs: clusterIPs()}
	others := testConfig()
	others.Mark, others.Table, others.RulePriority, others.Zone = 0x300, 77, 5, 9
	others.AliveTimeout = 2500e6
	others.Addresses = []netip.AddrPort{link4, netip.MustParseAddrPort("10.96.0.10:5353")}
	return map[string]Config{"both-families": testConfig(), "cluster-ip": clusterIP, "other-numbers": others}
}

func TestRuleSetText(t *testing.T) {
	for name, cfg := range ruleSets() {
		t.Run(name, func(t *testing.T) {
			rs := mustRuleSet(t, cfg)
			golden(t, name+".nft", rs.Text(NFTables))
			golden(t, name+".iptables", rs.Text(IPTables))
		})
	}
}

// TestTextIsValid holds the printed text against the programs that it is for.
func TestTextIsValid(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	for name, cfg := range ruleSets() {
		t.Run(name, func(t *testing.T) {
			rs := mustRuleSet(t, cfg)
			command(t, ns, rs.Text(NFTables), "nft", "-c", "-f", "-")
			for _, variant := range []string{"nft", "legacy"} {
				for fam, restore := range []string{"iptables-" + variant + "-restore", "ip6tables-" + variant + "-restore"} {
					if rs.covers(fam) {
						command(t, ns, rs.restoreText(fam), restore, "--noflush", "--test")
					}
				}
			}
		})
	}
}

// TestKernelGetsTheText proves that what is sent to the kernel is what is
// printed: nft shows the same for both.
func TestKernelGetsTheText(t *testing.T) {
	for name, cfg := range ruleSets() {
		t.Run(name, func(t *testing.T) {
			rs := mustRuleSet(t, cfg)
			printed, sent := labtest.NewNamespace(t, "printed"), labtest.NewNamespace(t, "sent")
			process := rs.process(false)
			fallback, hasFallback := rs.fallback()
			text := process.String()
			if hasFallback {
				text += fallback.String()
			}
			command(t, printed, text, "nft", "-f", "-")
			in(t, sent, func() error {
				return withConn(func(c *netlink.Conn) error {
					var b batch
					b.assert(&process)
					if hasFallback {
						b.assert(&fallback)
					}
					return b.commit(c)
				})
			})
			want, got := command(t, printed, "", "nft", "list", "ruleset"), command(t, sent, "", "nft", "list", "ruleset")
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("printed and sent rules differ (-printed +sent):\n%s", diff)
			}
			if !strings.Contains(got, "socket transparent 1") {
				t.Errorf("nft shows no socket match:\n%s", got)
			}
			// nft shows expressions that it does not know as comments.
			if odd := regexp.MustCompile(`#.*`).FindString(got); odd != "" {
				t.Errorf("nft does not understand %q", odd)
			}
		})
	}
}

// withConn opens a netlink socket for a batch.
func withConn(f func(*netlink.Conn) error) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	return errors.Join(f(c), c.Close())
}

func TestDisjoint(t *testing.T) {
	prefixes := func(list ...string) []netip.Prefix {
		var out []netip.Prefix
		for _, s := range list {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	for name, tc := range map[string]struct{ in, want []netip.Prefix }{
		"none":               {nil, nil},
		"one inside another": {prefixes("10.0.0.7/32", "10.0.0.0/24"), prefixes("10.0.0.0/24")},
		"the same twice":     {prefixes("10.0.0.7/32", "10.0.0.7/32"), prefixes("10.0.0.7/32")},
		"host bits":          {prefixes("10.0.0.7/24"), prefixes("10.0.0.0/24")},
		"neighbours stay":    {prefixes("10.0.1.0/24", "10.0.0.0/24"), prefixes("10.0.0.0/24", "10.0.1.0/24")},
		"both families":      {prefixes("::/0", "0.0.0.0/0"), prefixes("0.0.0.0/0", "::/0")},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, disjoint(tc.in), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Errorf("disjoint(%v) (-want +got):\n%s", tc.in, diff)
			}
		})
	}
}
