package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// guardOnly is a daemon that does not intercept: clients stay on kube-proxy's
// path, and only the guard is at work.
func guardOnly() []string {
	return []string{"intercept: {mode: none}", "listen: [127.0.0.1]"}
}

// pinned is a client that keeps its source port, and where its flow leads.
type pinned struct {
	*lab.PinnedClient
	endpoint netip.Addr
	outcomes lab.Timeline
}

// crowd are pinned clients of one pod, at least one at each DNS pod.
type crowd struct {
	n       *node
	clients []*pinned
	stop    context.CancelFunc
	running sync.WaitGroup
}

// crowd starts clients that ask the ClusterIP every 20 ms for names that no
// cache has. Stop it.
func (n *node) crowd() *crowd {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	c := &crowd{n: n, stop: cancel}
	n.t.Cleanup(c.end)
	for seen := map[netip.Addr]int{}; len(seen) < len(n.dns) || len(c.clients) < 4; {
		number := len(c.clients)
		if number > 40 {
			n.t.Fatalf("all of %d flows lead to the same DNS pod", number)
		}
		client, err := lab.NewPinnedClient(n.t.Context(), n.pod.Namespace, lab.ClientConfig{
			Server: clusterIP4, Interval: 20 * time.Millisecond, Timeout: time.Second,
			Name: func(seq int) string { return fmt.Sprintf("c%d-%d.uncached.svc.cluster.local.", number, seq) },
		})
		if err != nil {
			n.t.Fatal(err)
		}
		p := &pinned{PinnedClient: client}
		c.clients = append(c.clients, p)
		c.running.Go(func() { p.outcomes = p.Run(ctx) })
		await(n.t, "a flow of the client", func() bool {
			f, ok, err := n.Node.FlowOf(p.Local, clusterIP4)
			if err != nil {
				n.t.Fatal(err)
			}
			p.endpoint = f.Endpoint.Addr()
			return ok
		})
		seen[p.endpoint]++
	}
	return c
}

// end stops the clients and waits for their queries. Ending twice is no error.
func (c *crowd) end() {
	c.stop()
	c.running.Wait()
	for _, p := range c.clients {
		_ = p.Close() // a second time
	}
}

// at returns the clients that began at the DNS pod.
func (c *crowd) at(d *lab.DNSPod) []*pinned {
	var out []*pinned
	for _, p := range c.clients {
		if p.endpoint == d.IP4 {
			out = append(out, p)
		}
	}
	return out
}

// healed returns how long after a moment the last of the clients had its first
// good answer to a query sent since; and fails the test if any query failed
// that was sent later than the given grace.
func healed(t *testing.T, clients []*pinned, since time.Time, grace time.Duration) time.Duration {
	t.Helper()
	var worst time.Duration
	for _, p := range clients {
		took := time.Duration(-1)
		for _, o := range p.outcomes {
			switch after := o.Sent.Sub(since); {
			case after < 0:
			case o.Err == nil && took < 0:
				took = after + o.Took
			case o.Err != nil && after > grace:
				t.Errorf("client %v: a query %v after the event: %v", p.Local, after, o.Err)
			}
		}
		if took < 0 {
			t.Errorf("client %v was never healed", p.Local)
		}
		worst = max(worst, took)
	}
	return worst
}

// undisturbed checks clients whose DNS pod lives: no query failed, and their
// flows were never touched.
func undisturbed(t *testing.T, d *guardd, clients []*pinned) {
	t.Helper()
	for _, p := range clients {
		if failed := p.outcomes.Failed(); failed > 0 {
			t.Errorf("client %v of the living DNS pod: %d queries failed", p.Local, failed)
		}
		f, ok, err := d.n.Node.FlowOf(p.Local, clusterIP4)
		if err != nil || !ok || f.Endpoint.Addr() != p.endpoint {
			t.Errorf("flow of client %v of the living DNS pod: %v, %v, %v", p.Local, f, ok, err)
		}
		if line := d.logged("flow deleted", p.Local.String()); line != "" {
			t.Errorf("a living flow was deleted: %s", line)
		}
	}
}

// TestNodeGuard: a DNS pod dies and leaves the EndpointSlice while kube-proxy
// lags. The flows to it go, come back by the old rules, go again, and are
// healed for good the moment that the rules change.
func TestNodeGuard(t *testing.T) {
	n := newNode(t)
	d := n.start("a", guardOnly()...)
	defer d.stop()
	c := n.crowd()
	dead, alive := n.dns[0], n.dns[1]
	victims := c.at(dead)

	// The old rules name nobody else, so that every flow comes back to it.
	if err := n.DNS.SetEndpoints(lab.Endpoints(dead)...); err != nil {
		t.Fatal(err)
	}
	n.Node.Proxy.Hold()
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := n.DNS.SetEndpoints(lab.Endpoints(alive)...); err != nil { // held
		t.Fatal(err)
	}
	n.tell(func(c *cluster) { c.leave(dead) })
	told := time.Now()
	await(t, "the flows to be purged", func() bool {
		return d.metric("dnsguard_guard_deleted_total", `reason="endpoint-gone"`) >= float64(len(victims))
	})
	t.Logf("purged %v after the file changed (looked at every 250 ms, twice)", time.Since(told))
	await(t, "flows made again by the old rules", func() bool { return d.metric("dnsguard_guard_recreated_total") >= 3 })
	if err := n.Node.Proxy.Release(); err != nil {
		t.Fatal(err)
	}
	released := time.Now()
	<-time.After(700 * time.Millisecond) // of answers
	c.end()
	t.Logf("healed %v after the rules changed", healed(t, victims, released, 200*time.Millisecond))
	undisturbed(t, d, c.at(alive))

	line := d.awaitLog("flow deleted", victims[0].Local.String())
	for _, want := range []string{"frontend=10.96.0.10:53", "endpoint=" + dead.Endpoints()[0].String(), "service=kube-system/kube-dns", "reason=endpoint-gone"} {
		if !strings.Contains(line, want) {
			t.Errorf("the audit log lacks %s: %s", want, line)
		}
	}
	if d.logged("flow deleted", "by_event=true") == "" {
		t.Error("no flow was deleted by an event")
	}
	if n := d.metric("dnsguard_guard_news_to_purge_seconds_count"); n == 0 {
		t.Error("the time from news to purge was not measured")
	}
	t.Logf("news to purge: %v s in all of %v purges", d.metric("dnsguard_guard_news_to_purge_seconds_sum"), d.metric("dnsguard_guard_news_to_purge_seconds_count"))
}

// TestNodeGuardTerminating: the ordinary graceful deletion of a DNS pod whose
// process is dead already. kube-proxy 1.37 leaves its flows alone until the
// endpoint stops to serve, 10 s.
func TestNodeGuardTerminating(t *testing.T) {
	n := newNode(t)
	d := n.start("a", guardOnly()...)
	defer d.stop()
	c := n.crowd()
	dead, alive := n.dns[0], n.dns[1]
	// Only who has answered a probe before is believed dead: a policy may
	// keep probes away. The first comes within a second; the daemon itself
	// asks the same, so a count does not tell it.
	probe := lab.Question{Name: "cluster.local.", Type: dns.TypeSOA}
	<-time.After(1500 * time.Millisecond)
	await(t, "probes of the endpoints", func() bool { return dead.Server.Counts()[probe] >= len(dead.Endpoints()) })
	if err := n.DNS.SetEndpoints(lab.Endpoints(alive)...); err != nil {
		t.Fatal(err)
	}
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	n.tell(func(c *cluster) { c.serve(dead, "{ready: false, serving: true, terminating: true}") })
	await(t, "the flows to be purged", func() bool {
		return d.metric("dnsguard_guard_deleted_total", `reason="terminating-silent"`) > 0
	})
	s := d.status()
	if g := s.Guard; g == nil || !slices.Contains(g.Silent, dead.Endpoints()[0].String()) || g.Idle || g.Known == 0 || g.Kernel.Dumps == 0 {
		t.Errorf("/statusz does not tell of the dead endpoint: %+v", g)
	}
	if c := s.Cluster; c == nil || !c.Synced || c.Age > 2 {
		t.Errorf("/statusz: cluster %+v", c)
	}
	<-time.After(700 * time.Millisecond) // of answers
	c.end()
	t.Logf("healed %v after the pod was killed and the file changed", healed(t, c.at(dead), killed, 1500*time.Millisecond))
	undisturbed(t, d, c.at(alive))
}

// TestNodeGuardOwnSockets: a DNS pod that the daemon itself asks dies without a
// word. At the news the sockets that lead to it are retired, and what was asked
// over them is asked again.
func TestNodeGuardOwnSockets(t *testing.T) {
	for _, tt := range []struct {
		name     string
		timeouts string
		within   time.Duration // a question may wait
		// lag is for how long after the news the old rules, which name both
		// pods, hold. Without, they change before, and all sockets led to the
		// dead pod.
		lag time.Duration
	}{
		// No question waits for a hedge or a retry: both come too late to help.
		{"rules first", "timeouts: {hedge: 1300ms, retry: 1400ms, stale: 1450ms, total: 1500ms}", 1300 * time.Millisecond, 0},
		// New sockets, too, may be sent to the dead pod.
		{"rules lag", "timeouts: {}", 1300 * time.Millisecond, 500 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			dead, alive := n.dns[0], n.dns[1]
			if tt.lag == 0 {
				if err := n.DNS.SetEndpoints(lab.Endpoints(dead)...); err != nil {
					t.Fatal(err)
				}
			}
			d := n.start("a", append(guardOnly(), tt.timeouts)...)
			defer d.stop()
			load := &stream{name: "own sockets", ns: n.Node.Namespace, load: lab.Load{
				Server: loopback53, Rate: 300, Queries: 900, Sockets: 4,
				Names: []string{"uncached.svc.cluster.local."}, Unique: true, Timeout: 2 * time.Second,
			}}
			start := time.Now()
			wait := drive(t, []*stream{load})
			after(start, time.Second)
			if tt.lag > 0 {
				n.Node.Proxy.Hold()
			}
			if err := dead.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := n.DNS.SetEndpoints(lab.Endpoints(alive)...); err != nil {
				t.Fatal(err)
			}
			n.tell(func(c *cluster) { c.leave(dead) })
			if tt.lag > 0 {
				d.awaitLog("flow deleted")
				<-time.After(tt.lag)
				if err := n.Node.Proxy.Release(); err != nil {
					t.Fatal(err)
				}
			}
			if lost := wait(); lost > 0 {
				t.Errorf("%d questions failed", lost)
			}
			worst := load.result.Percentile(100)
			if worst >= tt.within {
				t.Errorf("a question waited for %v", worst)
			}
			deleted, retired, again := d.metric("dnsguard_guard_deleted_total"), d.metric("dnsguard_guard_retired_sockets_total"), d.metric("dnsguard_upstream_resends_total")
			t.Logf("the longest wait %v; %v flows deleted, %v made again; %v sockets retired, %v questions asked again, %v hedges, %v retries", worst,
				deleted, d.metric("dnsguard_guard_recreated_total"), retired, again, d.metric("dnsguard_upstream_hedges_total"), d.metric("dnsguard_upstream_retries_total"))
			// With both pods in the rules it is luck whether a socket in use leads
			// to the dead one.
			if tt.lag == 0 && (retired == 0 || again == 0) {
				t.Error("no socket was retired, or nothing was asked again over another")
			}
		})
	}
}

// TestNodeFlows: the command lists flows with the guard's verdict, asked of the
// daemon, or found out alone. A dry run leaves what is stale.
func TestNodeFlows(t *testing.T) {
	n := newNode(t)
	d := n.start("a", append(guardOnly(), "guard: {enabled: true, dryRun: true}")...)
	c := n.crowd()
	dead := n.dns[0]
	n.tell(func(c *cluster) { c.leave(dead) }) // it goes on to answer: the flows stay
	d.awaitLog("flow would be deleted", c.at(dead)[0].Local.String())
	check := func(how string) {
		t.Helper()
		want := map[string]string{}
		for _, p := range c.clients {
			want[p.Local.String()] = "live"
			if p.endpoint == dead.IP4 {
				want[p.Local.String()] = "stale"
			}
		}
		code, out := n.command("flows", "--config", d.config, "-o", "json")
		var flows []flowStatus
		if err := json.Unmarshal([]byte(out), &flows); code != exitOK || err != nil {
			t.Fatalf("%s: code %d, %v: %s", how, code, err, out)
		}
		got := map[string]string{}
		for _, f := range flows {
			if strings.HasPrefix(f.Client, n.pod.IP4.String()) {
				got[f.Client] = f.Verdict
			}
			if f.Verdict == "stale" && (f.Reason != "endpoint-gone" || f.Endpoint != dead.Endpoints()[0].String()) {
				t.Errorf("%s: %+v", how, f)
			}
		}
		for client, verdict := range want {
			if got[client] != verdict {
				t.Errorf("%s: the flow of %s is %q, want %q", how, client, got[client], verdict)
			}
		}
		code, out = n.command("flows", "--config", d.config, "--stale")
		if rows := strings.Count(out, "\n"+n.pod.IP4.String()+":"); code != exitOK || rows != len(c.at(dead)) || strings.Contains(out, "live") {
			t.Errorf("%s: --stale printed:\n%s", how, out)
		}
	}
	check("with the daemon")
	d.stop()
	check("without it")
	c.end()
	if line := d.logged("flow deleted"); line != "" {
		t.Errorf("a dry run deletes: %s", line)
	}
	for _, p := range c.clients {
		if failed := p.outcomes.Failed(); failed > 0 {
			t.Errorf("client %v: %d queries failed", p.Local, failed)
		}
	}
}

// status gets /statusz as JSON over the control socket.
func (d *guardd) status() (s status) {
	d.t.Helper()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", d.control)
		},
	}}
	req, err := http.NewRequestWithContext(d.t.Context(), http.MethodGet, "http://dnsguard/statusz", nil)
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		d.t.Fatal(err)
	}
	return s
}

// rewrite replaces the daemon's configuration and tells it, which is sooner than that
// it looks.
func (d *guardd) rewrite(more ...string) {
	d.t.Helper()
	name := strings.TrimSuffix(filepath.Base(d.config), ".yaml")
	if err := os.WriteFile(d.config, []byte(d.n.configuration(name, more...)), 0o600); err != nil {
		d.t.Fatal(err)
	}
	d.signal(syscall.SIGHUP)
}

// reconfigure waits until a new configuration is in use.
func (d *guardd) reconfigure(more ...string) {
	d.t.Helper()
	before := d.metric("dnsguard_config_reloads_total", `result="success"`)
	d.rewrite(more...)
	await(d.t, "the configuration to be in use", func() bool {
		return d.metric("dnsguard_config_reloads_total", `result="success"`) > before
	})
}

// TestNodeGuardReload: the guard's configuration changes while it works. A
// Service that is no longer guarded has not vanished: its flows stay.
func TestNodeGuardReload(t *testing.T) {
	n := newNode(t)
	with := func(guard string) []string { return append(guardOnly(), "guard: "+guard) }
	d := n.start("a", with("{dryRun: true}")...)
	defer d.stop()
	c := n.crowd()
	leaver, stays := n.dns[0], n.dns[1]
	n.tell(func(c *cluster) { c.leave(leaver) }) // it goes on to answer
	d.awaitLog("flow would be deleted", c.at(leaver)[0].Local.String())

	d.reconfigure(with("{dryRun: false}")...)
	d.awaitLog("flow deleted", c.at(leaver)[0].Local.String())
	if err := n.DNS.SetEndpoints(lab.Endpoints(stays)...); err != nil {
		t.Fatal(err)
	}
	c.end()
	undisturbed(t, d, c.at(stays))

	// Its flows are to be seen, as soon as the cluster has been read anew.
	d.reconfigure(with("{services: [kube-system/other]}")...)
	await(t, "a warning", func() bool {
		return d.page("/readyz") == "ok\nwarning: kubernetes services: no such Service: kube-system/other"
	})
	d.awaitLog("configured Services do not exist", "kube-system/other")
	if code, out := n.command("flows", "--config", d.config); code != exitOK || strings.Contains(out, clusterIP4.String()) {
		t.Errorf("code %d: the flows of a Service that is not guarded are judged:\n%s", code, out)
	}
	undisturbed(t, d, c.at(stays))
	if err := n.ask(n.Node.Namespace, "udp", loopback53, cachedName); err != nil {
		t.Error(err)
	}

	d.reconfigure(with("{enabled: false}")...)
	if text := d.page("/metrics"); strings.Contains(text, "dnsguard_guard_") {
		t.Error("there are metrics of a guard that is off")
	}
	if code, out := n.command("flows", "--config", d.config); code == exitOK || !strings.Contains(out, "guard.enabled") {
		t.Errorf("code %d: %s", code, out)
	}

	d.reconfigure(with("{services: [kube-system/other, kube-system/kube-dns]}")...)
	await(t, "flows to be judged", func() bool { return d.metric("dnsguard_guard_flows", `verdict="live"`) > 0 })
	n.tell(func(c *cluster) {
		c.serve(leaver, "")
		c.leave(stays)
	})
	await(t, "flows to be deleted again", func() bool { return d.metric("dnsguard_guard_deleted_total") > 0 })

	// The Service that did not exist appears.
	d.reconfigure(with("{services: [kube-system/other]}")...)
	await(t, "nothing to guard", func() bool { return d.metric("dnsguard_guard_state_info", `state="no-service"`) == 1 })
	n.tell(func(c *cluster) { c.other = "10.96.0.20" })
	await(t, "the Service", func() bool { return d.page("/readyz") == "ok" })
	d.awaitLog("all configured Services exist")
	await(t, "a guard with something to do", func() bool { return d.metric("dnsguard_guard_state_info", `state="unseen"`) == 1 })
	if g := d.status().Guard; g == nil || !g.Idle || !strings.Contains(d.page("/statusz"), "idle: the guard has seen no flow") {
		t.Errorf("/statusz does not tell of an idle guard: %+v", g)
	}
	if n := strings.Count(d.log.String(), "configured Services do not exist"); n != 2 { // each time that it had not been missed before
		t.Errorf("told %d times", n)
	}
	if line := d.logged("level=ERROR"); line != "" {
		t.Errorf("an error: %s", line)
	}
}
