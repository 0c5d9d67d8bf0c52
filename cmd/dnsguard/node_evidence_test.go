package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// counts reads whether the kernel counts the packets of flows on the node.
func (n *node) counts() (value string) {
	n.t.Helper()
	err := n.Node.Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_acct")
		value = strings.TrimSpace(string(text))
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return value
}

// TestNodeEvidence: a DNS pod dies and everybody goes on to call it ready, as for
// the first 40 s after the loss of a node. The daemon has the kernel count, sees
// that flows which were answered are so no more, and moves them; nobody has set
// the sysctl.
func TestNodeEvidence(t *testing.T) {
	n := newNode(t)
	if err := n.Node.Sysctl("net/netfilter/nf_conntrack_acct", "0"); err != nil {
		t.Fatal(err)
	}
	d := n.start("a", append(guardOnly(), "guard: {enabled: true, evidence: true}")...)
	d.awaitLog("the kernel counts the packets of flows to come")
	if got := n.counts(); got != "1" {
		t.Fatalf("nf_conntrack_acct is %s", got)
	}
	if text := nft(t, n.Node.Namespace, "", "list", "table", "inet", "dnsguard-accounting"); !strings.Contains(text, "flags owner") || !strings.Contains(text, "ct packets 0") {
		t.Errorf("the table:\n%s", text)
	}
	code, printed := n.command("rules", "--config", d.config)
	if code != exitOK || !strings.Contains(printed, "table inet dnsguard-accounting {") || strings.Contains(printed, "ip rule") {
		t.Errorf("rules: code %d:\n%s", code, printed)
	}

	c := n.crowd()
	dead, alive := n.dns[0], n.dns[1]
	victims := c.at(dead)
	// Only who has answered a probe before is believed dead: see
	// TestNodeGuardTerminating.
	<-time.After(1500 * time.Millisecond)
	probe := lab.Question{Name: "cluster.local.", Type: dns.TypeSOA}
	await(t, "probes of the endpoints", func() bool { return dead.Server.Counts()[probe] >= len(dead.Endpoints()) })
	if got := d.metric("dnsguard_guard_deleted_total"); got != 0 {
		t.Errorf("%v flows deleted while all is well", got)
	}
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	await(t, "the flows to be moved", func() bool {
		return d.metric("dnsguard_guard_deleted_total", `reason="unanswered"`) >= float64(len(victims))
	})
	t.Logf("%d flows moved %v after the pod died", len(victims), time.Since(killed))
	d.awaitLog("flow deleted", "reason=unanswered", victims[0].Local.String())
	c.end()
	undisturbed(t, d, c.at(alive))

	// Somebody turns it off.
	if err := n.Node.Sysctl("net/netfilter/nf_conntrack_acct", "0"); err != nil {
		t.Fatal(err)
	}
	await(t, "the kernel to count again", func() bool { return n.counts() == "1" })
	d.stop()
	if left := n.leftovers(); left != nil {
		t.Errorf("left: %v", left)
	}

	// cleanup ends a daemon that only has the kernel count, too.
	d = n.start("a", append(guardOnly(), "guard: {enabled: true, evidence: true}")...)
	await(t, "the table", func() bool { return n.leftovers() != nil })
	if code, out := n.command("cleanup", "--config", d.config); code != exitOK {
		t.Errorf("cleanup: code %d: %s", code, out)
	}
	d.exited()
	if left := n.leftovers(); left != nil {
		t.Errorf("cleanup leaves %v", left)
	}
}

// TestNodeEvidenceOff: nobody has the kernel count who does not want evidence.
func TestNodeEvidenceOff(t *testing.T) {
	n := newNode(t)
	if err := n.Node.Sysctl("net/netfilter/nf_conntrack_acct", "0"); err != nil {
		t.Fatal(err)
	}
	d := n.start("a")
	await(t, "the guard at work", func() bool { return d.metric("dnsguard_guard_state_info", `state="guarding"`) == 1 })
	if code, printed := n.command("rules", "--config", d.config); code != exitOK || strings.Contains(printed, "accounting") {
		t.Errorf("rules: code %d:\n%s", code, printed)
	}
	d.stop()
	if got := n.counts(); got != "0" {
		t.Errorf("nf_conntrack_acct is %s", got)
	}
}
