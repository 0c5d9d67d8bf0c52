package iptables

import (
	"errors"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

func TestAccountingText(t *testing.T) {
	golden(t, "accounting.nft", AccountingText())
	printed, sent := labtest.NewNamespace(t, "printed"), labtest.NewNamespace(t, "sent")
	table := accountingTable(0, false)
	command(t, printed, table.String(), "nft", "-f", "-")
	in(t, sent, func() error {
		return withConn(func(c *netlink.Conn) error {
			var b batch
			b.assert(&table)
			return b.commit(c)
		})
	})
	want, got := command(t, printed, "", "nft", "list", "ruleset"), command(t, sent, "", "nft", "list", "ruleset")
	if want != got || !strings.Contains(got, "ct packets 0") {
		t.Errorf("printed:\n%s\nsent:\n%s", want, got)
	}
}

// sysctlOf reads what the kernel says about counting in a namespace.
func sysctlOf(t *testing.T, ns *lab.Namespace) (value string) {
	t.Helper()
	in(t, ns, func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_acct")
		value = strings.TrimSpace(string(text))
		return err
	})
	return value
}

// packetsOf returns what the kernel has counted of a client's flow to vip4, in
// both directions; counted is false if it does not.
func packetsOf(t *testing.T, ns *lab.Namespace, client net.Addr) (packets [2]int, counted bool) {
	t.Helper()
	_, port, _ := net.SplitHostPort(client.String())
	line := command(t, ns, "", "conntrack", "-L", "-p", "udp", "--orig-port-src", port)
	found := regexp.MustCompile(`packets=(\d+)`).FindAllStringSubmatch(line, -1)
	if len(found) != 2 {
		return packets, false
	}
	for i := range packets {
		packets[i], _ = strconv.Atoi(found[i][1])
	}
	return packets, true
}

// TestAccounting: without the sysctl the kernel counts nothing; the table has it
// count the flows to come, as often as somebody turns that off.
func TestAccounting(t *testing.T) {
	s := newScene(t)
	node := s.Node.Namespace
	if err := s.Node.Sysctl("net/netfilter/nf_conntrack_acct", "0"); err != nil {
		t.Fatal(err)
	}
	dial := func() net.Conn {
		t.Helper()
		c, err := s.pod.Dial(t.Context(), "udp", vip4.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	exchange := func(c net.Conn) {
		t.Helper()
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(withProbe(testConfig()).Probe); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 512)); err != nil {
			t.Fatal(err)
		}
	}
	before := dial()
	exchange(before)
	if got, counted := packetsOf(t, node, before.LocalAddr()); counted {
		t.Fatalf("the kernel counts by itself, and this proves nothing: %v", got)
	}

	var a, second Accounting
	ensure := func(a *Accounting, want bool) {
		t.Helper()
		var changed bool
		in(t, node, func() (err error) {
			changed, err = a.Ensure()
			return err
		})
		if changed != want {
			t.Errorf("changed something: %v, want %v", changed, want)
		}
		if got := sysctlOf(t, node); got != "1" {
			t.Fatalf("nf_conntrack_acct is %s", got)
		}
	}
	tables := func() string {
		return strings.Join(strings.Fields(command(t, node, "", "nft", "list", "tables", "inet")), " ")
	}
	defer func() { _ = a.Close() }()
	defer func() { _ = second.Close() }()
	ensure(&a, true)
	ensure(&a, false)
	c := dial()
	for n := 1; n <= 3; n++ {
		exchange(c)
		if got, counted := packetsOf(t, node, c.LocalAddr()); !counted || got != [2]int{n, n} {
			t.Errorf("after %d queries: counted %v, %v", n, counted, got)
		}
	}

	// Somebody writes the sysctl, and somebody flushes the ruleset.
	if err := s.Node.Sysctl("net/netfilter/nf_conntrack_acct", "0"); err != nil {
		t.Fatal(err)
	}
	ensure(&a, true)
	command(t, node, "", "nft", "flush", "ruleset")
	ensure(&a, false)
	if got := tables(); !strings.Contains(got, "table inet dnsguard-accounting") {
		t.Errorf("tables: %s", got)
	}

	// A second process, as in an upgrade; the first one leaves.
	ensure(&second, true)
	if got := tables(); !strings.Contains(got, "table inet dnsguard-accounting-1") {
		t.Errorf("tables of two processes: %s", got)
	}
	in(t, node, func() error {
		if n, err := Cleanup(); !errors.Is(err, ErrRunning) || n != 0 {
			t.Errorf("cleanup beside living processes: removed %d, %v", n, err)
		}
		return a.Close()
	})
	ensure(&second, false)
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(10 * time.Second); strings.Contains(tables(), "accounting"); {
		if time.Now().After(deadline) {
			t.Fatalf("still there: %s", tables())
		}
	}

	// What a process leaves before Linux 5.12, where tables have no owner.
	in(t, node, func() error {
		return withConn(func(c *netlink.Conn) error {
			old := accountingTable(0, false)
			var b batch
			b.assert(&old)
			return b.commit(c)
		})
	})
	ensure(&a, true) // adopted
	if a.owner {
		t.Error("the kernel gives an owner to a table that is there")
	}
	command(t, node, "", "nft", "flush", "ruleset")
	ensure(&a, true)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	in(t, node, func() error {
		return withConn(func(c *netlink.Conn) error {
			old := accountingTable(0, false)
			var b batch
			b.assert(&old)
			return b.commit(c)
		})
	})
	in(t, node, func() error {
		n, err := Cleanup()
		if n == 0 {
			t.Error("cleanup leaves the table of a dead process")
		}
		return err
	})
	if got := tables(); strings.Contains(got, "accounting") {
		t.Errorf("left: %s", got)
	}
}
