package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// Tests of the whole daemon on a laboratory's node, as a process of its own.

// roleEnv makes the test binary the program that it tests: it is dnsguard with
// the command line that it is given.
const roleEnv = "DNSGUARD_TEST_IS_DNSGUARD"

func TestMain(m *testing.M) {
	if text := os.Getenv(confineEnv); text != "" {
		becomeConfined(text)
	}
	if os.Getenv(roleEnv) != "" {
		main()
		return
	}
	if os.Getenv(goLookupEnv) != "" {
		goLookups(os.Stdin, os.Stdout)
		return
	}
	code := m.Run()
	if builtDir != "" {
		_ = os.RemoveAll(builtDir)
	}
	os.Exit(code)
}

// Addresses that are intercepted on a node.
var (
	clusterIP4 = netip.MustParseAddrPort("10.96.0.10:53")
	clusterIP6 = netip.MustParseAddrPort("[fd00:10:96::a]:53")
	linkLocal4 = netip.MustParseAddrPort("169.254.20.10:53")
	linkLocal6 = netip.MustParseAddrPort("[fd53:dd:20::10]:53")
	loopback53 = netip.MustParseAddrPort("127.0.0.1:53")
)

// cachedName is in the stand-ins' zones, with a TTL that outlives a test.
const cachedName = "www.example.com."

// node is a laboratory with two DNS pods, a client pod, and a file that stands
// for the API server.
type node struct {
	*lab.Lab
	t       *testing.T
	dns     []*lab.DNSPod
	pod     *lab.Pod
	dir     string // of the files: short, since a socket's path must be
	exe     string // the program; empty: this test binary
	cluster cluster

	noVariable bool // as of pods that were started before the DNS Service
}

// newNode makes one. All DNS pods serve.
func newNode(t *testing.T) *node {
	t.Helper()
	labtest.Require(t)
	labtest.CheckLeaks(t)
	dir, err := os.MkdirTemp("", "dg") //nolint:usetesting // its paths are too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{Lab: labtest.New(t), t: t, dir: dir}
	n.dns = labtest.AddDNS(t, n.Lab, "dns-a", "dns-b")
	n.pod = labtest.AddPod(t, n.Lab, "client")
	n.cluster = cluster{endpoints: map[string][]clusterEndpoint{}}
	for _, d := range n.dns {
		n.cluster.serve(d, "")
	}
	n.cluster.pods = append(n.cluster.pods, clusterPod{name: "client", pod: n.pod})
	n.cluster.write(n.clusterFile())
	return n
}

func (n *node) clusterFile() string { return filepath.Join(n.dir, "cluster.yaml") }

// tell writes what the API server would say now.
func (n *node) tell(change func(*cluster)) {
	n.t.Helper()
	change(&n.cluster)
	n.cluster.write(n.clusterFile())
}

// configuration is the daemon's file. more replaces or adds top-level keys, one
// a line.
func (n *node) configuration(name string, more ...string) string {
	keys := map[string]string{
		"listen":     `[169.254.20.10, "fd53:dd:20::10"]`,
		"control":    n.control(name),
		"http":       `""`,
		"kubernetes": fmt.Sprintf("{source: file, file: %s, nodeName: node1}", n.clusterFile()),
		"intercept":  "{mode: cluster-ip}",
		"guard":      "{enabled: true}",
		"log":        "{level: debug, format: text}",
	}
	if !n.IPv6 {
		keys["listen"] = "[169.254.20.10]"
	}
	for _, line := range more {
		key, value, _ := strings.Cut(line, ":")
		keys[key] = value
	}
	var b strings.Builder
	for key, value := range keys {
		fmt.Fprintf(&b, "%s: %s\n", key, value)
	}
	return b.String()
}

func (n *node) control(name string) string { return filepath.Join(n.dir, name+".sock") }

// guardd is a dnsguard process on the node.
type guardd struct {
	n       *node
	t       *testing.T
	proc    *lab.Process
	log     *lines
	config  string
	control string
}

// launch starts "dnsguard run". name tells apart those that run together.
func (n *node) launch(name string, more ...string) *guardd {
	n.t.Helper()
	d := &guardd{n: n, t: n.t, log: new(lines), config: filepath.Join(n.dir, name+".yaml"), control: n.control(name)}
	if err := os.WriteFile(d.config, []byte(n.configuration(name, more...)), 0o600); err != nil {
		n.t.Fatal(err)
	}
	d.proc = n.program(d.log, "run", "--config", d.config)
	n.t.Cleanup(func() {
		if n.t.Failed() {
			n.t.Logf("log of %s:\n%s", name, d.log)
		}
	})
	return d
}

// start launches and waits until it is ready.
func (n *node) start(name string, more ...string) *guardd {
	n.t.Helper()
	d := n.launch(name, more...)
	d.awaitReady()
	return d
}

// program starts dnsguard on the node.
func (n *node) program(out *lines, args ...string) *lab.Process {
	n.t.Helper()
	exe := n.exe
	if exe == "" {
		var err error
		if exe, err = os.Executable(); err != nil {
			n.t.Fatal(err)
		}
	}
	env := append(os.Environ(), roleEnv+"=1")
	if !n.noVariable {
		env = append(env, "KUBE_DNS_SERVICE_HOST="+clusterIP4.Addr().String())
	}
	p, err := n.Node.Start(lab.Command{Path: exe, Args: args, Env: env, Stdout: out, Stderr: out})
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

// command runs dnsguard on the node to its end, and returns its exit code and
// what it printed, errors too.
func (n *node) command(args ...string) (code int, out string) {
	n.t.Helper()
	var l lines
	p := n.program(&l, args...)
	select {
	case <-p.Done():
	case <-time.After(eventually):
		_ = p.Signal(syscall.SIGKILL)
		n.t.Errorf("dnsguard %v does not end: %s", args, &l)
	}
	var exit interface{ ExitCode() int }
	if errors.As(p.Err(), &exit) {
		code = exit.ExitCode()
	}
	return code, l.String()
}

// eventually is how long a test waits for what must come, with the machine
// busy otherwise.
const eventually = 20 * time.Second

// await waits until ok, and fails the test if that does not come.
func await(t *testing.T, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > eventually {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond) // nothing outside the process tells of it
	}
	return time.Since(start)
}

// page gets a page over the control socket, whatever its status.
func (d *guardd) page(path string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	body, err := askDaemon(ctx, d.control, path)
	if err != nil {
		return err.Error()
	}
	return body
}

func (d *guardd) awaitReady() {
	d.t.Helper()
	last := ""
	defer func() {
		if d.t.Failed() {
			d.t.Logf("/readyz said %q", last)
		}
	}()
	await(d.t, "ready", func() bool {
		last = d.page("/readyz")
		return strings.HasPrefix(last, "ok")
	})
}

// awaitLog waits for a line of the log that holds all texts.
func (d *guardd) awaitLog(texts ...string) string {
	d.t.Helper()
	var line string
	await(d.t, fmt.Sprintf("a line of the log with %q", texts), func() bool {
		line = d.logged(texts...)
		return line != ""
	})
	return line
}

// logged returns the first line of the log that holds all texts.
func (d *guardd) logged(texts ...string) string {
	for line := range strings.Lines(d.log.String()) {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			return line
		}
	}
	return ""
}

// metric sums a metric's series whose labels hold all the texts.
func (d *guardd) metric(name string, labels ...string) float64 {
	sum := 0.0
	for line := range strings.Lines(d.page("/metrics")) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		bare, set, _ := strings.Cut(series, "{")
		if !ok || bare != name {
			continue
		}
		for _, l := range labels {
			ok = ok && strings.Contains(set, l)
		}
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil {
			sum += v
		}
	}
	return sum
}

func (d *guardd) signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.proc.Signal(s); err != nil {
		d.t.Fatal(err)
	}
}

// kill ends the process as the OOM killer would.
func (d *guardd) kill() {
	d.t.Helper()
	d.signal(syscall.SIGKILL)
	<-d.proc.Done()
}

// exited waits for the process's end, which must be in order.
func (d *guardd) exited() {
	d.t.Helper()
	select {
	case <-d.proc.Done():
		if err := d.proc.Err(); err != nil {
			d.t.Errorf("ended: %v", err)
		}
	case <-time.After(eventually):
		d.t.Fatal("does not end")
	}
}

// stop ends the process as kubelet would.
func (d *guardd) stop() {
	d.t.Helper()
	d.signal(syscall.SIGTERM)
	d.exited()
}

// asked counts how often the DNS pods were asked for cachedName.
func (n *node) asked() int {
	sum := 0
	for _, d := range n.dns {
		sum += d.Server.Counts()[lab.Question{Name: cachedName, Type: dns.TypeA}]
	}
	return sum
}

// ask asks once and returns the error, if any.
func (n *node) ask(from *lab.Namespace, network string, server netip.AddrPort, name string) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), 2*time.Second)
	defer cancel()
	reply, err := lab.Ask(ctx, from, network, server, name, dns.TypeA)
	switch {
	case err != nil:
		return err
	case reply.Rcode != dns.RcodeSuccess || len(reply.Answer) == 0:
		return fmt.Errorf("answer to %s: %v", name, reply)
	}
	return nil
}

// servers are the addresses that clients ask.
func (n *node) servers() []netip.AddrPort {
	if n.IPv6 {
		return []netip.AddrPort{clusterIP4, linkLocal4, clusterIP6, linkLocal6}
	}
	return []netip.AddrPort{clusterIP4, linkLocal4}
}

// flowsFrom lists the tracked DNS flows of one client.
func (n *node) flowsFrom(addr netip.Addr) []lab.Flow {
	n.t.Helper()
	all, err := n.Node.Flows()
	if err != nil {
		n.t.Fatal(err)
	}
	var out []lab.Flow
	for _, f := range all {
		if f.Client.Addr() == addr {
			out = append(out, f)
		}
	}
	return out
}

// cluster is what the file says.
type cluster struct {
	endpoints map[string][]clusterEndpoint // by address type
	pods      []clusterPod
	noService bool
	other     string // the address of a Service kube-system/other
}

type clusterEndpoint struct {
	addr       netip.Addr
	conditions string
}

type clusterPod struct {
	name        string
	pod         *lab.Pod
	annotations string
}

// serve makes a DNS pod an endpoint.
func (c *cluster) serve(d *lab.DNSPod, conditions string) {
	c.leave(d)
	if conditions == "" {
		conditions = "{ready: true, serving: true, terminating: false}"
	}
	c.endpoints["IPv4"] = append(c.endpoints["IPv4"], clusterEndpoint{d.IP4, conditions})
	if d.IP6.IsValid() {
		c.endpoints["IPv6"] = append(c.endpoints["IPv6"], clusterEndpoint{d.IP6, conditions})
	}
}

// leave takes a DNS pod out of the slices.
func (c *cluster) leave(d *lab.DNSPod) {
	for kind, all := range c.endpoints {
		var rest []clusterEndpoint
		for _, e := range all {
			if e.addr != d.IP4 && e.addr != d.IP6 {
				rest = append(rest, e)
			}
		}
		c.endpoints[kind] = rest
	}
}

// write replaces the file in one step, as a mounted ConfigMap changes.
func (c *cluster) write(file string) {
	var b bytes.Buffer
	b.WriteString("apiVersion: v1\nkind: Namespace\nmetadata: {name: default}\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: kube-system}\n")
	if !c.noService {
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: %[1]s
  clusterIPs: ["%[1]s", "%[2]s"]
  ports:
  - {name: dns, protocol: UDP, port: 53, targetPort: 53}
  - {name: dns-tcp, protocol: TCP, port: 53, targetPort: 53}
`, clusterIP4.Addr(), clusterIP6.Addr())
	}
	if c.other != "" {
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: other, namespace: kube-system}
spec:
  clusterIP: %[1]s
  clusterIPs: [%[1]q]
  ports: [{name: dns, protocol: UDP, port: 53}]
`, c.other)
	}
	for kind, endpoints := range c.endpoints {
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-%s, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: %s
ports:
- {name: dns, protocol: UDP, port: 53}
- {name: dns-tcp, protocol: TCP, port: 53}
endpoints:
`, strings.ToLower(kind), kind)
		for _, e := range endpoints {
			fmt.Fprintf(&b, "- {addresses: [%q], conditions: %s}\n", e.addr, e.conditions)
		}
	}
	for _, p := range c.pods {
		ips := fmt.Sprintf("{ip: %q}", p.pod.IP4)
		if p.pod.IP6.IsValid() {
			ips += fmt.Sprintf(", {ip: %q}", p.pod.IP6)
		}
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default, annotations: {%s}}
spec: {nodeName: node1, dnsPolicy: ClusterFirst, containers: [{name: c, image: i}]}
status: {phase: Running, podIP: %q, podIPs: [%s]}
`, p.name, p.annotations, p.pod.IP4, ips)
	}
	if err := os.WriteFile(file+".new", b.Bytes(), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		panic(err)
	}
}

// TestNode: what pods and the node itself ask is answered by the daemon, leaves
// no trace in conntrack, and the daemon's own questions take kube-proxy's path.
func TestNode(t *testing.T) {
	for _, v := range nodeVariants() {
		t.Run(v.name, func(t *testing.T) { testNode(t, v) })
	}
}

func testNode(t *testing.T, v nodeVariant) {
	n := newNode(t)
	d := v.start(n, "a")
	defer d.stop()
	for _, server := range v.servers(n) { // from the first moment that it is ready
		if d.metric("dnsguard_intercept_active", fmt.Sprintf("address=%q", server)) != 1 {
			t.Errorf("%v is not active", server)
		}
	}
	clients := map[string]*lab.Namespace{"pod": n.pod.Namespace}
	if v.host {
		clients["node"] = n.Node.Namespace
	}
	if err := n.ask(n.pod.Namespace, "udp", v.busiest(), cachedName); err != nil {
		t.Fatal(err)
	}
	if n.asked() == 0 {
		t.Error("no DNS pod was asked")
	}
	before, queries, want := n.asked(), d.metric("dnsguard_queries_total"), 0
	for who, ns := range clients {
		for _, server := range v.servers(n) {
			for _, network := range []string{"udp", "tcp"} {
				want++
				if err := n.ask(ns, network, server, cachedName); err != nil {
					t.Errorf("%s: %v", who, err)
				}
			}
		}
	}
	// The daemon probes itself, too.
	if got := d.metric("dnsguard_queries_total") - queries; got < float64(want) {
		t.Errorf("%v of %d queries reached the daemon", got, want)
	}
	if got := n.asked() - before; got != 0 {
		t.Errorf("DNS pods were asked %d times for what is cached", got)
	}
	for _, addr := range []netip.Addr{n.pod.IP4, n.pod.IP6} {
		if flows := n.flowsFrom(addr); len(flows) > 0 {
			t.Errorf("flows of %v are tracked: %v", addr, flows)
		}
	}
	own := n.flowsFrom(n.Node.IP4)
	if len(own) == 0 {
		t.Error("the daemon's own queries are not tracked")
	}
	for _, f := range own {
		if f.Frontend != clusterIP4 || f.Endpoint.Addr() != n.dns[0].IP4 && f.Endpoint.Addr() != n.dns[1].IP4 {
			t.Errorf("the daemon's own query went past kube-proxy: %v", f)
		}
	}
}
