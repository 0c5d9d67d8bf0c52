package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// TestNodeClusterBreaks: the source of the cluster's objects breaks while the
// daemon runs. DNS and guard keep what was known, and follow when it is back.
func TestNodeClusterBreaks(t *testing.T) {
	n := newNode(t)
	d := n.start("a", guardOnly()...)
	defer d.stop()
	c := n.crowd()
	check := func(what string) {
		t.Helper()
		d.awaitLog("watching the cluster does not get on", what)
		await(t, "a warning", func() bool {
			page := d.page("/readyz")
			return strings.HasPrefix(page, "ok\nwarning: kubernetes: out of date: ") && strings.Contains(page, what)
		})
		if err := n.ask(n.Node.Namespace, "udp", loopback53, cachedName); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, out := n.command("flows", "--config", d.config); strings.Count(out, " live ") < len(c.clients) {
			t.Errorf("%s: flows are not judged as before:\n%s", what, out)
		}
	}
	if err := os.WriteFile(n.clusterFile(), []byte("kind: Service\napiVersion: v1\nmetadata: {name: kube-dns\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("not YAML")
	if err := os.Remove(n.clusterFile()); err != nil {
		t.Fatal(err)
	}
	check("no such file")
	c.end()
	undisturbed(t, d, c.clients)

	n.tell(func(c *cluster) { c.leave(n.dns[0]) })
	d.awaitLog("watching the cluster gets on again")
	await(t, "the guard to follow", func() bool { return d.metric("dnsguard_guard_deleted_total") > 0 })
}

// TestNodeClusterBehind: kube-proxy hears of a DNS pod that the daemon does not
// know, since its source is broken, or lags without a word. Its answers are not
// lost.
func TestNodeClusterBehind(t *testing.T) {
	t.Run("broken", func(t *testing.T) { clusterBehind(t, true) })
	t.Run("late", func(t *testing.T) { clusterBehind(t, false) })
}

func clusterBehind(t *testing.T, broken bool) {
	n := newNode(t)
	newcomer := n.dns[1]
	n.tell(func(c *cluster) { c.leave(newcomer) })
	if err := n.DNS.SetEndpoints(lab.Endpoints(n.dns[0])...); err != nil {
		t.Fatal(err)
	}
	d := n.start("a", guardOnly()...)
	defer d.stop()
	if broken {
		if err := os.WriteFile(n.clusterFile(), []byte("kind: Service\napiVersion: v1\nmetadata: {name: kube-dns\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		d.awaitLog("watching the cluster does not get on", "not YAML")
	} else {
		await(t, "the guard to know the cluster", func() bool {
			return d.metric("dnsguard_guard_state_info") == 1 && d.metric("dnsguard_guard_state_info", `state="waiting"`) == 0
		})
	}
	if err := n.DNS.SetEndpoints(lab.Endpoints(newcomer)...); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
			t.Error(err)
		}
	}
	if line := d.logged("flow deleted", "client="+n.pod.IP4.String()); line != "" {
		t.Errorf("a living flow was deleted: %s", line)
	}
	if _, out := n.command("flows", "--config", d.config); !strings.Contains(out, "endpoint-unknown") {
		t.Errorf("the flows:\n%s", out)
	}

	// The newcomer is heard of.
	n.tell(func(c *cluster) { c.serve(newcomer, "") })
	if broken {
		d.awaitLog("watching the cluster gets on again")
	}
	await(t, "its flows to be in order", func() bool { return d.metric("dnsguard_guard_flows", `verdict="live"`) > 0 })
	if line := d.logged("flow deleted", "client="+n.pod.IP4.String()); line != "" {
		t.Errorf("a living flow was deleted: %s", line)
	}
}

// TestNodeGuardRestart: a DNS pod dies and leaves while the daemon is away. Its
// flows go soon after the start.
func TestNodeGuardRestart(t *testing.T) {
	n := newNode(t)
	d := n.start("a", guardOnly()...)
	c := n.crowd()
	dead, alive := n.dns[0], n.dns[1]
	d.stop()
	if err := n.DNS.SetEndpoints(lab.Endpoints(alive)...); err != nil {
		t.Fatal(err)
	}
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	n.tell(func(c *cluster) { c.leave(dead) })
	d = n.start("b", guardOnly()...)
	defer d.stop()
	started := time.Now()
	victims := c.at(dead)
	await(t, "the flows to be purged", func() bool {
		return d.metric("dnsguard_guard_deleted_total", `reason="endpoint-gone"`) >= float64(len(victims))
	})
	t.Logf("purged %v after the start", time.Since(started))
	purged := time.Now()
	<-time.After(700 * time.Millisecond) // of answers
	c.end()
	t.Logf("healed %v after that", healed(t, victims, purged, 200*time.Millisecond))
	undisturbed(t, d, c.at(alive))
}

// built returns the program as it is shipped; a test binary is larger. It is built
// once, and TestMain removes it.
func built(t *testing.T) string {
	t.Helper()
	dir, err := builtIn()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "dnsguard")
}

var builtIn = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dnsguard-built")
	if err != nil {
		return "", err
	}
	builtDir = dir
	cmd := exec.CommandContext(context.Background(), "go", "build", "-buildvcs=false", "-o", dir, ".")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build dnsguard: %w\n%s", err, out)
	}
	return dir, nil
})

var builtDir string // to be removed

// TestNodeMemory: what the whole daemon needs when idle, and that it serves
// without an API server.
func TestNodeMemory(t *testing.T) {
	exe := built(t)
	kubeconfig := func(n *node) string {
		file := filepath.Join(n.dir, "kubeconfig")
		text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: t}}]\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for name, kubernetes := range map[string]func(*node) string{
		"a file": func(n *node) string { return fmt.Sprintf("{source: file, file: %s, nodeName: node1}", n.clusterFile()) },
		"an API server out of reach": func(n *node) string {
			return fmt.Sprintf("{source: api, kubeconfig: %s, nodeName: node1}", kubeconfig(n))
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.exe = exe
			start := time.Now()
			d := n.launch("a", "kubernetes: "+kubernetes(n), "log: {level: info, format: json}")
			defer d.stop()
			await(t, "queries to be taken", func() bool {
				return d.metric("dnsguard_intercept_active", fmt.Sprintf("address=%q", clusterIP4)) == 1
			})
			t.Logf("took queries %v after the start", time.Since(start))
			for range 100 {
				if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
					t.Fatal(err)
				}
			}
			if !n.taken(n.pod, clusterIP4) {
				t.Error("queries are not taken")
			}
			<-time.After(2 * time.Second) // idle
			rss := residentMiB(t, d.proc)
			t.Logf("resident: %.1f MiB; /readyz: %s", rss, d.page("/readyz"))
			if rss > 40 {
				t.Errorf("%.1f MiB are resident, more than 40", rss)
			}
		})
	}
}

// residentMiB is the resident memory of a process.
func residentMiB(t *testing.T, p *lab.Process) float64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`VmRSS:\s*(\d+) kB`).FindSubmatch(status)
	if m == nil {
		t.Fatalf("no VmRSS in %s", status)
	}
	kib, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return float64(kib) / 1024
}
