package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// TestStartErrors: what is wrong on the node is said with the setting that
// changes it, before anything is applied.
func TestStartErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		prepare   []string // a command in the node's namespace
		change    func(*agentConfig)
		key       string
		text      []string
		iface     string
		supported bool // the error is not ErrNotSupported
	}{
		"mark in use": {
			prepare: []string{"ip", "rule", "add", "priority", "100", "fwmark", "0x20/0xff", "lookup", "7"},
			key:     "intercept.mark", text: []string{`100: from all fwmark 0x20/0xff lookup 7`, "ip rule"}, supported: true,
		},
		"table named by a rule": {
			prepare: []string{"ip", "-6", "rule", "add", "priority", "100", "iif", "lo", "lookup", "5353"},
			key:     "intercept.table", text: []string{"5353", "give the number of a table that is empty"}, supported: true,
		},
		"table with routes": {
			prepare: []string{"ip", "route", "add", "192.0.2.0/24", "dev", "lo", "table", "5353"},
			key:     "intercept.table", text: []string{"192.0.2.0/24", "ip -4 route show table 5353"}, supported: true,
		},
		"address on an interface": {
			prepare: []string{"ip", "addr", "add", "10.96.0.10/32", "dev", "lo"},
			iface:   "lo", text: []string{"listen:", "10.96.0.10", "ip addr del"}, supported: true,
		},
		"NodeLocal DNSCache": {
			prepare: []string{"sh", "-c", "ip link add nodelocaldns type veth; ip addr add 10.96.0.10/32 dev nodelocaldns"},
			iface:   "nodelocaldns", text: []string{"NodeLocal DNSCache"}, supported: true,
		},
		"IPVS": {
			prepare: []string{"sh", "-c", "ip link add kube-ipvs0 type veth; ip addr add 10.96.0.10/32 dev kube-ipvs0"},
			iface:   "kube-ipvs0", text: []string{"intercept.mode to link-local"}, supported: true,
		},
		"no capability": {
			change: func(c *agentConfig) { c.Powerless = true; c.NoListen = true },
			key:    "intercept.mode", text: []string{"NET_ADMIN"}, supported: true,
		},
		"no capability for iptables": {
			change: func(c *agentConfig) { c.Powerless = true; c.NoListen = true; c.Config.Backend = IPTables },
			key:    "intercept.mode", text: []string{"NET_ADMIN"}, supported: true,
		},
		"no capability for sockets": {
			change: func(c *agentConfig) { c.Powerless = true },
			key:    "intercept.mode", text: []string{"transparent", "NET_ADMIN"}, supported: true,
		},
		"no iptables programs": {
			change: func(c *agentConfig) { c.Path, c.Config.Backend = "/nowhere", IPTables },
			key:    "intercept.backend", text: []string{"iptables-restore", "CONFIG_NETFILTER_XT_MATCH_SOCKET"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "node")
			if tc.prepare != nil {
				command(t, ns, "", tc.prepare[0], tc.prepare[1:]...)
			}
			cfg := agentConfig{Config: clusterIPConfig()}
			if tc.change != nil {
				tc.change(&cfg)
			}
			_, err := tryAgent(t, ns, cfg)
			var p *agentProblem
			if !errors.As(err, &p) {
				t.Fatalf("started: %v", err)
			}
			if p.Key != tc.key || p.Interface != tc.iface || p.NotSupported == tc.supported {
				t.Errorf("got %+v", p)
			}
			for _, want := range tc.text {
				if !strings.Contains(p.Text, want) {
					t.Errorf("%q does not say %q", p.Text, want)
				}
			}
			if got := state(t, ns, variant{backend: NFTables}); strings.Contains(got, "dnsguard") {
				t.Errorf("left behind:\n%s", got)
			}
		})
	}
}

// TestAwaitAddresses takes over when NodeLocal DNSCache goes.
func TestAwaitAddresses(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	command(t, ns, "", "sh", "-c", "ip link add nodelocaldns type veth; ip addr add 169.254.20.10/32 dev nodelocaldns")
	proc := startRole(t, ns, "await-address")
	proc.line(t) // it waits from now on
	<-time.After(2 * checkEvery)
	start := time.Now()
	command(t, ns, "", "ip", "link", "del", "nodelocaldns")
	gone := time.Now()
	over, err := time.Parse(time.RFC3339Nano, proc.line(t))
	if err != nil {
		t.Fatal(err)
	}
	if over.Before(start) {
		t.Error("did not wait")
	}
	if took := over.Sub(gone); took > slack*100*time.Millisecond {
		t.Errorf("took over after %v, want 100 ms", took)
	}
}

func TestSelector(t *testing.T) {
	lacking := fmt.Errorf("%w: add rule: %w", ErrNotSupported, unix.ENOENT)
	passing := errors.New("no buffer space")
	forbidden := fmt.Errorf("add table: %w", fs.ErrPermission)
	for name, tc := range map[string]struct {
		want     Backend
		nft, ipt error
		backend  Backend
		key      string
		err      error // wrapped
		probes   int   // of nftables, in two choices
	}{
		"auto prefers nftables":           {want: Auto, backend: NFTables, probes: 1},
		"auto takes iptables":             {want: Auto, nft: lacking, backend: IPTables, probes: 1},
		"neither":                         {want: Auto, nft: lacking, ipt: lacking, key: "intercept.backend", err: ErrNotSupported, probes: 1},
		"nftables is wanted":              {want: NFTables, nft: lacking, key: "intercept.backend", err: ErrNotSupported, probes: 1},
		"iptables is wanted":              {want: IPTables, backend: IPTables},
		"a passing failure decides not":   {want: Auto, nft: passing, err: passing, probes: 2},
		"nor does a lack of capabilities": {want: Auto, nft: forbidden, key: "intercept.mode", err: fs.ErrPermission, probes: 2},
	} {
		t.Run(name, func(t *testing.T) {
			probes := 0
			s := newSelector(map[Backend]func(RuleSet) support{
				NFTables: func(RuleSet) support { probes++; return support{reason: "r", err: tc.nft} },
				IPTables: func(RuleSet) support { return support{reason: "r", err: tc.ipt} },
			})
			for range 2 {
				b, _, err := s.choose(tc.want, RuleSet{})
				var ce *ConfigError
				errors.As(err, &ce)
				if b != tc.backend || !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
					t.Errorf("choose: %v, %v", b, err)
				}
				if (tc.key != "") != (ce != nil) || ce != nil && ce.Key != tc.key {
					t.Errorf("error %v, want key %q", err, tc.key)
				}
			}
			if probes != tc.probes {
				t.Errorf("%d probes of nftables, want %d", probes, tc.probes)
			}
		})
	}
}

// TestProbe asks this kernel, and leaves nothing.
func TestProbe(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	rs := mustRuleSet(t, testConfig())
	in(t, ns, func() error {
		found := probeNFT(rs)
		if found.err != nil || !found.owner {
			t.Errorf("nftables: %+v", found)
		}
		r, err := openRuleset()
		if err != nil {
			return err
		}
		tables, err := r.allTables()
		if len(tables) > 0 {
			t.Errorf("the probe left %v", tables)
		}
		return errors.Join(err, r.Close())
	})
	for _, v := range variants(t)[1:] {
		in(t, ns, func() error {
			found := probeXT(inDirectory(v.path), rs)
			if found.err != nil {
				t.Errorf("%s: %+v", v.name, found)
			}
			return nil
		})
		if got := state(t, ns, v); strings.Contains(got, chainPrefix) {
			t.Errorf("the probe of %s left:\n%s", v.name, got)
		}
	}
}

// TestBatchErrors: a transaction that the kernel refuses names its part, and
// the socket works on.
func TestBatchErrors(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	in(t, ns, func() error {
		return withConn(func(c *netlink.Conn) error {
			broken := table{name: "t", chains: []chain{{name: "c", rules: []rule{{notrack{}}, {jump("nowhere")}}}}}
			var b batch
			b.assert(&broken)
			err := b.commit(c)
			var be *batchError
			if !errors.As(err, &be) || be.Op != "add rule t c 1 (jump nowhere)" || !errors.Is(err, unix.ENOENT) {
				t.Errorf("commit: %v", err)
			}
			broken.chains[0].rules = broken.chains[0].rules[:1]
			b = batch{}
			b.assert(&broken)
			if err := b.try(c); err != nil {
				t.Errorf("try: %v", err)
			}
			r, err := openRuleset()
			if err != nil {
				return err
			}
			defer func() { _ = r.Close() }()
			if _, exists, err := r.table("t"); exists || err != nil {
				t.Errorf("tried, not committed, but the table exists: %v, %v", exists, err)
			}
			if err := b.commit(c); err != nil {
				t.Errorf("commit after an error: %v", err)
			}
			return nil
		})
	})
}

func TestNFTSupport(t *testing.T) {
	for errno, conclusive := range map[unix.Errno]bool{
		unix.ENOENT: true, unix.EOPNOTSUPP: true, unix.EINVAL: true, unix.EPROTONOSUPPORT: true,
		unix.ENOBUFS: false, unix.EINTR: false, unix.ENOMEM: false, unix.EPERM: false, unix.EBUSY: false,
	} {
		if got := errors.Is(nftSupport(&batchError{Op: "add", Err: errno}), ErrNotSupported); got != conclusive {
			t.Errorf("%v: not supported: %v, want %v", errno, got, conclusive)
		}
	}
}

func TestXTSupport(t *testing.T) {
	exit := func(code int) error {
		return exec.CommandContext(t.Context(), "/bin/sh", "-c", fmt.Sprintf("exit %d", code)).Run()
	}
	for name, tc := range map[string]struct {
		err        error
		conclusive bool
	}{
		"no program":       {&exec.Error{Name: "iptables-restore", Err: exec.ErrNotFound}, true},
		"refused":          {exit(2), true},
		"the lock is held": {exit(lockTaken), false},
		"took too long":    {context.DeadlineExceeded, false},
	} {
		if got := errors.Is(xtSupport(tc.err), ErrNotSupported); got != tc.conclusive {
			t.Errorf("%s: not supported: %v, want %v", name, got, tc.conclusive)
		}
	}
}

// awaitAddressRole says when it begins to wait, and when it is over.
func awaitAddressRole() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fmt.Println("waiting")
	err := AwaitAddresses(ctx, []netip.Addr{link4.Addr()})
	fmt.Println(time.Now().Format(time.RFC3339Nano))
	return err
}
