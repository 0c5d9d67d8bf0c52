package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// nft runs nft in a namespace, with a script or with arguments.
func nft(t *testing.T, ns *lab.Namespace, script string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath("nft")
	if err != nil {
		labtest.Missing(t, err)
	}
	if script != "" {
		args = []string{"-f", "-"}
	}
	var out []byte
	err = ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), path, args...)
		cmd.Stdin = strings.NewReader(script)
		var err error
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("nft %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// taken tells whether queries of a pod are taken by the daemon: then they leave
// no flow. It asks from a new port.
func (n *node) taken(pod *lab.Pod, server netip.AddrPort) bool {
	n.t.Helper()
	count := func() (sum int) {
		for _, addr := range []netip.Addr{pod.IP4, pod.IP6} {
			if addr.IsValid() {
				sum += len(n.flowsFrom(addr))
			}
		}
		return sum
	}
	before := count()
	if err := n.ask(pod.Namespace, "udp", server, cachedName); err != nil {
		n.t.Errorf("%v asks %v: %v", pod, server, err)
	}
	return count() == before
}

// TestNodeExclude: clients that the configuration excludes, and pods that ask
// for it by an annotation, stay on kube-proxy's path; the annotation works
// while the daemon runs.
func TestNodeExclude(t *testing.T) {
	n := newNode(t)
	byRange, byAnnotation := labtest.AddPod(t, n.Lab, "by-range"), labtest.AddPod(t, n.Lab, "by-annotation")
	n.tell(func(c *cluster) { c.pods = append(c.pods, clusterPod{name: "by-annotation", pod: byAnnotation}) })
	exclude := byRange.IP4.String() + "/32"
	if n.IPv6 {
		exclude += fmt.Sprintf(", %q", byRange.IP6.String()+"/128")
	}
	d := n.start("a", "intercept: {mode: cluster-ip, exclude: ["+exclude+"]}")
	defer d.stop()
	for _, server := range n.servers() {
		if !n.taken(n.pod, server) || !n.taken(byAnnotation, server) {
			t.Errorf("queries to %v are not taken", server)
		}
		if n.taken(byRange, server) {
			t.Errorf("queries of an excluded client to %v are taken", server)
		}
	}
	n.tell(func(c *cluster) { c.pods[1].annotations = `dnsguard.io/intercept: "false"` })
	for _, server := range n.servers() {
		took := await(t, "the annotation to work", func() bool { return !n.taken(byAnnotation, server) })
		t.Logf("%v: let past after %v", server, took)
		if !n.taken(n.pod, server) {
			t.Errorf("%v: the other pod is let past, too", server)
		}
	}
	n.tell(func(c *cluster) { c.pods[1].annotations = "" })
	for _, server := range n.servers() {
		await(t, "the pod to be taken again", func() bool { return n.taken(byAnnotation, server) })
	}
}

// TestNodeFirewall: a firewall keeps a pod from the node, whether it asks often
// or seldom, beside others that ask a lot. It is let past within seconds, and an
// operator is told.
func TestNodeFirewall(t *testing.T) {
	for name, tt := range map[string]struct {
		rate, queries int
		outage        time.Duration
	}{
		"5 queries a second": {5, 30, 5 * time.Second}, // by libc's second try
		"1 query a second":   {1, 10, 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			blocked := labtest.AddPod(t, n.Lab, "blocked")
			d := n.start("a")
			defer d.stop()
			if !n.taken(blocked, clusterIP4) {
				t.Fatal("queries are not taken")
			}
			nft(t, n.Node.Namespace, fmt.Sprintf("table inet firewall { chain input { type filter hook input priority filter; ip saddr %v drop; }; }", blocked.IP4))
			length := time.Duration(tt.queries) * time.Second / time.Duration(tt.rate)
			wait := drive(t, []*stream{{name: "another pod", ns: n.pod.Namespace, load: lab.Load{
				Server: clusterIP4, Rate: 500, Queries: int(500 * length.Seconds()), Sockets: 4, Names: []string{cachedName}, Timeout: time.Second,
			}}})
			r, err := lab.Load{
				Server: clusterIP4, Rate: tt.rate, Queries: tt.queries, Names: []string{cachedName}, Timeout: time.Second,
			}.Run(t.Context(), blocked.Namespace)
			if err != nil {
				t.Fatal(err)
			}
			wait()
			t.Log(r)
			if _, length := r.LongestOutage(); length == 0 || length > tt.outage {
				t.Errorf("no answer for %v", length)
			}
			d.awaitLog("client does not reach us", "client="+blocked.IP4.String(), "transport=udp")
			await(t, "a warning", func() bool { return strings.Contains(d.page("/readyz"), "do not reach us and are let past") })
			if got := d.metric("dnsguard_intercept_bypassed_clients"); got != 1 {
				t.Errorf("%v clients are let past", got)
			}
			if !n.taken(n.pod, clusterIP4) {
				t.Error("another pod is let past, too")
			}
			if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") {
				t.Errorf("/readyz: %s", page)
			}
		})
	}
}

// TestNodeForeignRule: a routing rule that sorts before ours is a warning.
func TestNodeForeignRule(t *testing.T) {
	n := newNode(t)
	d := n.start("a", "intercept: {mode: cluster-ip, rulePriority: 1000}")
	defer d.stop()
	rule := netlink.NewRule()
	rule.Priority, rule.Table, rule.IifName, rule.Family = 10, 100, "nobody0", netlink.FAMILY_V4
	if err := n.Node.Do(func() error { return netlink.RuleAdd(rule) }); err != nil {
		t.Fatal(err)
	}
	d.awaitLog("a routing rule of somebody else sorts before ours", "nobody0")
	await(t, "a warning", func() bool {
		page := d.page("/readyz")
		return strings.HasPrefix(page, "ok") && strings.Contains(page, "warning: intercept rules: ") && strings.Contains(page, "nobody0")
	})
	if err := n.Node.Do(func() error { return netlink.RuleDel(rule) }); err != nil {
		t.Fatal(err)
	}
	await(t, "the warning to go", func() bool { return !strings.Contains(d.page("/readyz"), "nobody0") })
}

// leftovers lists what is there of ours: tables, iptables chains and the jumps
// there, routing rules and routes.
func (n *node) leftovers() (out []string) {
	n.t.Helper()
	for line := range strings.Lines(nft(n.t, n.Node.Namespace, "", "list", "tables")) {
		if strings.Contains(line, "dnsguard") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(n.run(save, "-t", "raw")) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, ":DNSGUARD") || strings.Contains(line, "-j DNSGUARD") {
				out = append(out, save+": "+line)
			}
		}
	}
	err := n.Node.Do(func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Table == 5353 {
					out = append(out, fmt.Sprintf("rule %v", r))
				}
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: 5353}, netlink.RT_FILTER_TABLE)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			for _, r := range routes {
				out = append(out, fmt.Sprintf("route %v", r))
			}
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// run runs a program on the node and returns what it prints.
func (n *node) run(name string, args ...string) string {
	n.t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		labtest.Missing(n.t, err)
	}
	var out []byte
	err = n.Node.Do(func() (err error) {
		out, err = exec.CommandContext(n.t.Context(), path, args...).Output()
		return err
	})
	if err != nil {
		n.t.Fatalf("%s %v: %v", name, args, err)
	}
	return string(out)
}

// TestNodeRepair: what somebody removes comes back, once.
func TestNodeRepair(t *testing.T) {
	for _, v := range nodeVariants() {
		t.Run(v.name, func(t *testing.T) { testNodeRepair(t, v) })
	}
}

func testNodeRepair(t *testing.T, v nodeVariant) {
	n := newNode(t)
	d := v.start(n, "a")
	defer d.stop()
	before := n.leftovers()
	remove := map[string]func() error{
		"nft flush ruleset": func() error {
			nft(t, n.Node.Namespace, "", "flush", "ruleset")
			return n.DNS.SetEndpoints(lab.Endpoints(n.dns...)...) // kube-proxy's went, too
		},
		"ip rule del": func() error {
			return n.Node.Do(func() error {
				rules, err := netlink.RuleList(netlink.FAMILY_V4)
				for _, r := range rules {
					if r.Table == 5353 {
						r.Family = netlink.FAMILY_V4
						err = errors.Join(err, netlink.RuleDel(&r))
					}
				}
				return err
			})
		},
		"ip route flush table 5353": func() error {
			return n.Node.Do(func() error {
				routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 5353}, netlink.RT_FILTER_TABLE)
				for _, r := range routes {
					err = errors.Join(err, netlink.RouteDel(&r))
				}
				return err
			})
		},
	}
	for what, do := range remove {
		repairs := d.metric("dnsguard_intercept_repairs_total")
		if err := do(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		// What is removed in parts may be repaired in parts.
		var diff string
		start := time.Now()
		for diff = "no repair"; diff != "" && time.Since(start) < 10*time.Second; <-time.After(5 * time.Millisecond) {
			if d.metric("dnsguard_intercept_repairs_total") > repairs {
				diff = cmp.Diff(before, n.leftovers())
			}
		}
		t.Logf("%s: repaired after %v", what, time.Since(start)) // a second, on a machine that has nothing else to do
		if diff != "" {
			t.Errorf("%s (-before +after):\n%s", what, diff)
		}
		for _, server := range v.servers(n) {
			// Answers must have left since: @alive may have gone as well.
			await(t, fmt.Sprintf("queries to %v to be taken after %s", server, what), func() bool { return n.taken(n.pod, server) })
		}
	}
	d.awaitLog("rules or routes had been removed by somebody")
}

// TestNodeCleanup: cleanup ends the daemon and leaves nothing.
func TestNodeCleanup(t *testing.T) {
	for _, v := range nodeVariants() {
		t.Run(v.name, func(t *testing.T) { testNodeCleanup(t, v) })
	}
}

func testNodeCleanup(t *testing.T, v nodeVariant) {
	n := newNode(t)
	d := v.start(n, "a")
	if n.leftovers() == nil {
		t.Fatal("there is nothing to clean up")
	}
	start := time.Now()
	code, out := n.command("cleanup", "--config", d.config, "--control", n.control("wrong"))
	if code != exitWrong || !strings.Contains(out, "end it first") || !strings.Contains(out, n.control("wrong")) {
		t.Errorf("with the wrong control socket: code %d: %s", code, out)
	}
	t.Logf("refused after %v", time.Since(start))
	if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") || !n.taken(n.pod, v.busiest()) {
		t.Errorf("the daemon was disturbed: %s", page)
	}

	code, out = n.command("cleanup", "--config", d.config)
	if code != exitOK || !regexp.MustCompile(`^removed \d+\n$`).MatchString(out) {
		t.Errorf("code %d: %s", code, out)
	}
	d.exited()
	if left := n.leftovers(); left != nil {
		t.Errorf("left: %v", left)
	}
	code, out = n.command("cleanup", "--config", d.config)
	if code != exitOK || out != "removed 0\n" {
		t.Errorf("the second time: code %d: %s", code, out)
	}

	// After a crash what is left are routing rules, routes and the fallback, or
	// iptables chains.
	d = v.start(n, "a")
	d.kill()
	if n.leftovers() == nil {
		t.Error("a crash leaves nothing, and this proves nothing")
	}
	code, out = n.command("cleanup", "--config", d.config)
	if left := n.leftovers(); code != exitOK || left != nil {
		t.Errorf("after a crash: code %d: %s; left: %v", code, out, left)
	}
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Error(err)
	}
}

// TestNodeRules: what the command prints is what the kernel has.
func TestNodeRules(t *testing.T) {
	n := newNode(t)
	// With an exclusion in each family the rules that look clients up are there.
	d := n.start("a", `intercept: {mode: cluster-ip, exclude: [192.0.2.0/24, "2001:db8::/32"]}`, "guard: {enabled: true, evidence: true}")
	defer d.stop()
	await(t, "packets to be counted", func() bool { return n.counts() == "1" })
	code, text := n.command("rules", "--config", d.config)
	if code != exitOK {
		t.Fatalf("code %d: %s", code, text)
	}
	printed := labtest.NewNamespace(t, "printed")
	nft(t, printed, strings.ReplaceAll(text, "flags owner", "")) // else they end with nft
	rules := func(ns *lab.Namespace) string {
		var b strings.Builder
		for _, table := range []string{"dnsguard", "dnsguard-fallback", "dnsguard-accounting"} {
			b.WriteString(nft(t, ns, "", "--stateless", "list", "table", "inet", table))
		}
		// Which services are alive, and which clients were taken, is news.
		dynamic := regexp.MustCompile(`(?s)(set (?:alive|taken|bypass)\d \{.*?)\n\t\telements = \{.*?\}`)
		// The rule that lets clients past is there only while there are some.
		bypass := regexp.MustCompile(`\n.* @bypass\d return`)
		owner := regexp.MustCompile(`\tflags owner| # progname .*`)
		text := owner.ReplaceAllString(dynamic.ReplaceAllString(b.String(), "$1"), "")
		text = bypass.ReplaceAllString(text, "")
		return regexp.MustCompile(`\n\s*\n`).ReplaceAllString(text, "\n")
	}
	if diff := cmp.Diff(rules(printed), rules(n.Node.Namespace)); diff != "" {
		t.Errorf("(-printed +kernel):\n%s", diff)
	}
	for _, server := range n.servers() {
		if route := fmt.Sprintf("route add local %v/%d dev lo table 5353", server.Addr(), server.Addr().BitLen()); !strings.Contains(text, route) {
			t.Errorf("the text lacks %q", route)
		}
	}
}

// TestNodeStandsBy: NodeLocal DNSCache owns an address. The daemon waits, with
// the guard at work, and takes over when the address goes.
func TestNodeStandsBy(t *testing.T) {
	n := newNode(t)
	nodelocal := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "nodelocaldns"}} // these machines have no dummy links
	err := n.Node.Do(func() error {
		if err := netlink.LinkAdd(nodelocal); err != nil {
			return err
		}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: linkLocal4.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}}
		return errors.Join(netlink.AddrAdd(nodelocal, addr), netlink.LinkSetUp(nodelocal))
	})
	if err != nil {
		t.Fatal(err)
	}
	other, err := lab.NewDNSServer(t.Context(), n.Node.Namespace, []*lab.Zone{lab.ExternalZone()}, linkLocal4)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	d := n.launch("a")
	defer d.stop()
	d.awaitLog("standing by", "interface=nodelocaldns")
	await(t, "a reason not to be ready", func() bool {
		page := d.page("/readyz")
		return strings.Contains(page, "intercept: standing by") && strings.Contains(page, "NodeLocal DNSCache")
	})
	if err := n.ask(n.pod.Namespace, "udp", linkLocal4, cachedName); err != nil {
		t.Error(err)
	}
	if udp, _ := other.Total(); udp != 1 {
		t.Errorf("NodeLocal DNSCache was asked %d times", udp)
	}
	await(t, "the guard at work", func() bool { return d.metric("dnsguard_guard_state_info", `state="guarding"`) == 1 })

	load := lab.Load{
		Server: linkLocal4, Rate: 200, Queries: 400, Names: []string{cachedName}, Timeout: time.Second,
	}
	result := make(chan *lab.LoadResult, 1)
	go func() {
		r, err := load.Run(t.Context(), n.pod.Namespace)
		if err != nil {
			t.Error(err)
		}
		result <- r
	}()
	await(t, "queries", func() bool { udp, _ := other.Total(); return udp > 20 })
	if err := n.Node.Do(func() error { return netlink.LinkDel(nodelocal) }); err != nil {
		t.Fatal(err)
	}
	gone := time.Now()
	// It closes its sockets after the address went, and does not share them.
	d.awaitLog("the addresses are free")
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	d.awaitReady()
	t.Logf("ready %v after the address went", time.Since(gone))
	r := <-result
	t.Log(r)
	if _, length := r.LongestOutage(); length > 300*time.Millisecond { // 100 ms, and a busy machine
		t.Errorf("no answer for %v", length)
	}
	if !n.taken(n.pod, linkLocal4) {
		t.Error("queries are not taken")
	}
}
