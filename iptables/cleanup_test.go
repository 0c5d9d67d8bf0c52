package iptables

import (
	"errors"
	"strings"
	"testing"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// everything shows all that the kernel has of a node's rules and routes.
func everything(t *testing.T, ns *lab.Namespace, v variant) string {
	t.Helper()
	var out strings.Builder
	out.WriteString(command(t, ns, "", "nft", "--stateless", "list", "ruleset"))
	for _, family := range []string{"-4", "-6"} {
		out.WriteString(command(t, ns, "", "ip", family, "rule", "show"))
		out.WriteString(command(t, ns, "", "ip", family, "route", "show", "table", "all"))
	}
	if v.backend == IPTables {
		for _, save := range []string{"iptables-save", "ip6tables-save"} {
			for line := range strings.Lines(command(t, ns, "", v.path+"/"+save)) {
				if strings.HasPrefix(line, "-A") || strings.Contains(line, chainPrefix) {
					out.WriteString(line)
				}
			}
		}
	}
	return out.String()
}

// TestCleanup removes what a killed process left, with other settings than it
// had, and nothing else.
func TestCleanup(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			t.Setenv("PATH", v.path+":/usr/sbin:/usr/bin:/sbin:/bin")
			ns := labtest.NewNamespace(t, "node")
			command(t, ns, "table inet others {\nchain c { type filter hook input priority 0; }\n}", "nft", "-f", "-")
			command(t, ns, "", "ip", "route", "add", "192.0.2.0/24", "dev", "lo", "table", "99")
			command(t, ns, "", "ip", "rule", "add", "priority", "50", "lookup", "99")
			if v.backend == IPTables { // the built-in chains exist from now on
				for _, fam := range []string{"iptables-restore", "ip6tables-restore"} {
					command(t, ns, "*raw\n-A OUTPUT -j ACCEPT\n-A PREROUTING -j ACCEPT\nCOMMIT\n", v.path+"/"+fam, "--noflush")
				}
			}
			before := everything(t, ns, v)
			cfg := v.config()
			cfg.Table, cfg.Mark, cfg.RulePriority = 77, 0x300, 9
			a := startAgent(t, ns, agentConfig{Config: cfg, Path: v.path})
			a.awaitTaking(2 * len(cfg.Addresses))
			in(t, ns, func() error {
				if n, err := Cleanup(); !errors.Is(err, ErrRunning) || n != 0 {
					t.Errorf("beside a living process: removed %d, %v", n, err)
				}
				return nil
			})
			if st := a.stats(); !st.Active[vip4.String()] {
				t.Errorf("the living process is disturbed: %+v", st)
			}
			a.kill()
			in(t, ns, func() error {
				n, err := Cleanup()
				if err != nil || n == 0 {
					t.Errorf("removed %d, %v", n, err)
				}
				again, err := Cleanup()
				if err != nil || again != 0 {
					t.Errorf("the second time removed %d, %v", again, err)
				}
				return nil
			})
			if after := everything(t, ns, v); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// TestClose leaves nothing but the fallback, and Cleanup nothing at all.
func TestClose(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "node")
			cfg := v.config()
			a := startAgent(t, ns, agentConfig{Config: cfg, Path: v.path})
			a.awaitTaking(2 * len(cfg.Addresses))
			a.call("Close", struct{}{}, nil)
			got := state(t, ns, v)
			if v.backend == NFTables {
				if !strings.HasPrefix(got, "table inet "+fallbackName) {
					t.Errorf("left behind:\n%s", got)
				}
			} else if got != "" {
				t.Errorf("left behind:\n%s", got)
			}
			a.call("Close", struct{}{}, nil) // twice is no error
			var unused struct{}
			if err := a.rpc.Call("Agent.Withdraw", "4", &unused); err == nil || err.Error() != ErrClosed.Error() {
				t.Errorf("Withdraw after Close: %v", err)
			}
		})
	}
}

// TestSuccessor takes over what a killed predecessor left, whatever it used.
func TestSuccessor(t *testing.T) {
	all := variants(t)
	for _, first := range all {
		for _, second := range all {
			if first.backend == IPTables && second.backend == IPTables && first.name != second.name {
				continue // a node has one variant
			}
			t.Run(first.name+" then "+second.name, func(t *testing.T) {
				s := newScene(t)
				path := first.path
				if path == "" {
					path = second.path
				}
				cfg := clusterIPConfig()
				cfg.Backend = first.backend
				a := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg, Path: path})
				a.awaitTaking(4)
				a.kill()
				cfg.Backend = second.backend
				b := startAgent(t, s.Node.Namespace, agentConfig{Config: cfg, Path: path})
				b.awaitTaking(4)
				wantFrom(t, s.pod.Namespace, "udp", vip4, true)
				b.call("Withdraw", "", nil)
				wantFrom(t, s.pod.Namespace, "udp", vip4, false)
				wantFrom(t, s.pod.Namespace, "tcp", vip6, false)
			})
		}
	}
}
