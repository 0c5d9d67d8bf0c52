package iptables

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// learned are the sets that packets fill.
var learned = regexp.MustCompile(`(?s)\tset (alive|taken)\d \{.*?\n\t\}\n`)

// state is everything of ours that a node's kernel shows.
func state(t *testing.T, ns *lab.Namespace, v variant) string {
	t.Helper()
	var out strings.Builder
	for _, family := range []string{"-4", "-6"} {
		out.WriteString(command(t, ns, "", "ip", family, "rule", "show", "fwmark", "0x10/0x10"))
		// It fails for a table without routes.
		if routes, err := tryCommand(t, ns, "", "ip", family, "route", "show", "table", "5353"); err == nil {
			out.WriteString(routes)
		}
	}
	if v.backend == IPTables {
		for _, save := range []string{"iptables-save", "ip6tables-save"} {
			for line := range strings.Lines(command(t, ns, "", v.path+"/"+save, "-t", "raw")) {
				if strings.Contains(line, chainPrefix) {
					out.WriteString(line)
				}
			}
		}
		return out.String()
	}
	for _, name := range []string{"dnsguard", fallbackName} {
		if table, err := tryCommand(t, ns, "", "nft", "--stateless", "list", "table", "inet", name); err == nil {
			out.WriteString(learned.ReplaceAllString(table, ""))
		}
	}
	return out.String()
}

// within polls until f is true, and returns how long that took.
func within(t *testing.T, limit time.Duration, what string, f func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !f() {
		if time.Since(start) > limit {
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
	return time.Since(start)
}

// TestRepair removes what is ours by every means that nodes have seen.
func TestRepair(t *testing.T) {
	type damage struct {
		name    string
		command []string
	}
	common := []damage{
		{"ip rule del", []string{"ip", "rule", "del", "priority", "1"}},
		{"ip -6 rule del", []string{"ip", "-6", "rule", "del", "priority", "1"}},
		{"ip rule flush", []string{"sh", "-c", "ip rule flush; ip rule add priority 32766 lookup main"}},
		{"a route deleted", []string{"ip", "route", "del", "local", "10.96.0.10", "table", "5353"}},
		{"a route replaced by a blackhole", []string{"ip", "route", "replace", "blackhole", "10.96.0.10", "table", "5353"}},
		{"a route replaced by a throw", []string{"ip", "route", "replace", "throw", "10.96.0.10", "table", "5353"}},
		{"a route for one TOS before ours", []string{"sh", "-c", "ip route add blackhole 10.96.0.10 tos 0x10 table 5353; ip route replace prohibit 10.96.0.10 table 5353"}},
		{"an IPv6 route before ours", []string{"ip", "-6", "route", "add", "blackhole", vip6.Addr().String(), "metric", "1", "table", "5353"}},
		{"ip route flush", []string{"ip", "route", "flush", "table", "5353"}},
		{"ip -6 route flush", []string{"ip", "-6", "route", "flush", "table", "5353"}},
	}
	for _, v := range variants(t) {
		damages := common
		switch v.backend {
		case NFTables:
			damages = append(damages,
				damage{"nft flush ruleset", []string{"nft", "flush", "ruleset"}},
				damage{"fallback deleted", []string{"nft", "delete", "table", "inet", fallbackName}},
				damage{"fallback emptied", []string{"nft", "flush", "chain", "inet", fallbackName, "rewrite"}},
				damage{"fallback changed", []string{"nft", "add", "rule", "inet", fallbackName, "rewrite", "counter"}},
				damage{"fallback drops", []string{"nft", "chain", "inet", fallbackName, "input", "{ policy drop; }"}})
		default:
			damages = append(damages,
				damage{"table emptied", []string{v.path + "/iptables-restore"}},
				damage{"jump deleted", []string{"sh", "-c", `printf '*raw\n-D PREROUTING -j DNSGUARD-QUERY\nCOMMIT\n' | ` + v.path + "/iptables-restore --noflush"}},
				damage{"jump doubled", []string{"sh", "-c", `printf '*raw\n-A PREROUTING -j DNSGUARD-QUERY\nCOMMIT\n' | ` + v.path + "/ip6tables-restore --noflush"}},
				damage{"chain emptied", []string{"sh", "-c", `printf '*raw\n-F DNSGUARD-REPLY\nCOMMIT\n' | ` + v.path + "/ip6tables-restore --noflush"}})
		}
		t.Run(v.name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "node")
			a := startAgent(t, ns, agentConfig{Config: v.config(), Path: v.path})
			a.awaitTaking(2 * len(v.config().Addresses))
			want := state(t, ns, v)
			for _, d := range damages {
				t.Run(d.name, func(t *testing.T) {
					repairs := a.stats().Repairs
					command(t, ns, "*raw\nCOMMIT\n", d.command[0], d.command[1:]...)
					// A second is the promise, on a machine that has time; the log has what it took.
					took := within(t, 5*slack*time.Second, "repair", func() bool { return state(t, ns, v) == want })
					t.Logf("%v", took.Round(time.Millisecond))
					a.await(Repaired, 1)
					within(t, 5*time.Second, "count", func() bool { return a.stats().Repairs > repairs })
				})
			}
			// Our own changes must not look like somebody's.
			repairs := a.stats().Repairs
			a.call("Withdraw", "6", nil)
			a.call("Restore", "6", nil)
			a.await(Taking, 2*len(v.config().Addresses)+2)
			if n := a.stats().Repairs; n != repairs {
				t.Errorf("%d repairs were counted for what we did ourselves", n-repairs)
			}
		})
	}
}

// TestOwnerTableCannotBeRemoved is why the process's own table needs no repair.
func TestOwnerTableCannotBeRemoved(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	a := startAgent(t, ns, agentConfig{Config: clusterIPConfig()})
	a.awaitTaking(4)
	want := state(t, ns, variant{backend: NFTables})
	if !strings.Contains(want, "flags owner") {
		t.Fatalf("the table has no owner:\n%s", want)
	}
	command(t, ns, "", "nft", "flush", "ruleset")
	if out, err := tryCommand(t, ns, "", "nft", "delete", "table", "inet", "dnsguard"); err == nil {
		t.Errorf("nft could delete the table: %s", out)
	}
	if got := state(t, ns, variant{backend: NFTables}); got != want {
		t.Errorf("others could change the table:\n%s", got)
	}
	if n := a.stats().Repairs; n != 0 {
		t.Errorf("%d repairs were counted", n)
	}
}

// TestRepairsDoNotPileUp looks ten thousand times, repairs the routing every
// time and the tables every hundredth, and counts what is there. Deleting rules
// costs the kernel tens of milliseconds (it waits for its readers before the
// next transaction), so to write the tables ten thousand times as well takes a
// quarter of an hour: DNSGUARD_LONG=1.
func TestRepairsDoNotPileUp(t *testing.T) {
	looks, every := 10_000, 100
	if os.Getenv("DNSGUARD_LONG") == "1" {
		every = 1
	}
	ns := labtest.NewNamespace(t, "node")
	rs := mustRuleSet(t, testConfig())
	in(t, ns, func() error {
		k, err := newNFTKernel(0, false, func() bool { return true })
		if err != nil {
			return err
		}
		defer func() { _ = k.close() }()
		r := rs.routing()
		if _, err := k.ensure(rs); err != nil {
			return err
		}
		if _, _, err := r.ensure(); err != nil {
			return err
		}
		count := func() (rules, routes int, err error) {
			for fam := range 2 {
				list, e1 := netlink.RuleList(netlinkFamily(fam))
				all, e2 := r.list(fam)
				rules, routes, err = rules+len(list), routes+len(all), errors.Join(err, e1, e2)
			}
			return rules, routes, err
		}
		rules, routes, err := count()
		if err != nil {
			return err
		}
		for n := range looks {
			written := n%every == 0
			if written {
				// As if somebody had changed every table.
				for name, c := range k.tables {
					c.image = nil
					k.tables[name] = c
				}
				k.generation = 0
			}
			if repaired, err := k.ensure(rs); err != nil || repaired != written {
				t.Errorf("look %d: %v, %v", n, repaired, err)
				return err
			}
			if err := netlink.RuleDel(r.rule(n % 2)); err != nil {
				return err
			}
			if err := netlink.RouteDel(r.route(r.addrs[n%len(r.addrs)])); err != nil {
				return err
			}
			if added, _, err := r.ensure(); err != nil || added != 2 {
				t.Errorf("repair %d of the routing: %d added, %v", n, added, err)
				return err
			}
		}
		rulesNow, routesNow, err := count()
		if rulesNow != rules || routesNow != routes {
			t.Errorf("%d rules and %d routes after %d repairs, %d and %d before", rulesNow, routesNow, looks, rules, routes)
		}
		return err
	})
	// The process's own table went with close.
	tables := command(t, ns, "", "nft", "list", "tables")
	if strings.Count(tables, "dnsguard") != 1 || !strings.Contains(tables, fallbackName) {
		t.Errorf("tables that are left:\n%s", tables)
	}
	fallback, _ := rs.fallback()
	want := 0
	for _, c := range fallback.chains {
		want += len(c.rules)
	}
	got := 0
	for line := range strings.Lines(command(t, ns, "", "nft", "--handle", "list", "table", "inet", fallbackName)) {
		if strings.Contains(line, "# handle") && !strings.Contains(line, "{") {
			got++
		}
	}
	if got != want {
		t.Errorf("the fallback has %d rules after %d repairs, want %d", got, looks/every, want)
	}
}

// TestXTRepairsDoNotPileUp is the same for iptables, whose jumps lie in chains
// that others use too.
func TestXTRepairsDoNotPileUp(t *testing.T) {
	for _, v := range variants(t)[1:] {
		t.Run(v.name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "node")
			rs := mustRuleSet(t, v.config())
			in(t, ns, func() error {
				k, err := newXTKernel(inDirectory(v.path), rs)
				if err != nil {
					return err
				}
				if _, err := k.ensure(rs); err != nil {
					return err
				}
				first, err := k.save(0)
				if err != nil {
					return err
				}
				for n := range 20 {
					k.carried[0].image, k.mark = "", changeMark{}
					if repaired, err := k.ensure(rs); err != nil || !repaired {
						t.Errorf("repair %d: %v, %v", n, repaired, err)
						return err
					}
				}
				last, err := k.save(0)
				if chains := chainsOf(0); chains.image(first) != chains.image(last) {
					t.Errorf("first:\n%s\nlast:\n%s", first, last)
				}
				return errors.Join(err, k.close())
			})
			if left := state(t, ns, v); left != "" {
				t.Errorf("left behind:\n%s", left)
			}
		})
	}
}

// inDirectory runs programs of one variant.
func inDirectory(dir string) program {
	return func(name, stdin string, args ...string) (string, error) {
		return runProgram(dir+"/"+name, stdin, args...)
	}
}

// TestUnownedTables covers kernels before 5.12: the process's table is an
// ordinary one.
func TestUnownedTables(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	rs := mustRuleSet(t, testConfig())
	in(t, ns, func() error {
		k, err := newNFTKernel(0, false, func() bool { return true })
		if err != nil {
			return err
		}
		if repaired, err := k.ensure(rs); err != nil || repaired {
			t.Errorf("first: %v, %v", repaired, err)
		}
		if repaired, err := k.ensure(rs); err != nil || repaired {
			t.Errorf("second: %v, %v", repaired, err)
		}
		return nil
	})
	want := state(t, ns, variant{backend: NFTables})
	in(t, ns, func() error {
		k, err := newNFTKernel(0, false, func() bool { return true })
		if err != nil {
			return err
		}
		defer func() { _ = k.close() }()
		// It takes over what a predecessor left.
		if repaired, err := k.ensure(rs); err != nil || repaired {
			t.Errorf("adoption: %v, %v", repaired, err)
		}
		for _, damage := range [][]string{
			{"flush", "ruleset"},
			{"delete", "element", "inet", "dnsguard", "local4", "{ 10.96.0.10 . udp . 53 }"},
			{"flush", "chain", "inet", "dnsguard", "prerouting"},
		} {
			command(t, ns, "", "nft", damage...)
			if repaired, err := k.ensure(rs); err != nil || !repaired {
				t.Errorf("nft %v: %v, %v", damage, repaired, err)
			}
			if got := state(t, ns, variant{backend: NFTables}); got != want {
				t.Errorf("after nft %v:\n%s\nwant:\n%s", damage, got, want)
			}
		}
		return nil
	})
	// A dead process's table acts on, so the next process removes it.
	in(t, ns, func() error {
		var b batch
		old := newRuleSet(rs.cfg, 3, nil).process(false)
		b.assert(&old)
		return withConn(b.commit)
	})
	in(t, ns, func() error { return removeLeftovers(0, NFTables) })
	if tables := command(t, ns, "", "nft", "list", "tables"); strings.Contains(tables, "dnsguard-3") {
		t.Errorf("tables that are left:\n%s", tables)
	}
}
