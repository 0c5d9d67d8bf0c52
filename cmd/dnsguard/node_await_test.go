package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Tests of starts before the cluster's DNS Service is known.

// unheard is why it is not, where nobody has told of it.
const unheard = "the cluster has not told it, and the environment has no KUBE_DNS_SERVICE_HOST"

// TestNodeAwaitsService: where nothing tells the Service's address, the daemon stays
// and says so, takes and answers nothing, ends in order, and begins when the Service
// is there.
func TestNodeAwaitsService(t *testing.T) {
	variants := nodeVariants()
	clusterIP, linkLocal := variants[0], variants[1]
	plain := nodeVariant{intercept: "intercept: {mode: none}"}
	for _, c := range []struct {
		name   string
		source func(*node) (kubernetes string, appear func())
		why    string
		v      nodeVariant
	}{
		{"file, cluster-ip", fileWithoutService, "the cluster has no such Service", clusterIP},
		{"file, link-local alone", fileWithoutService, "the cluster has no such Service", linkLocal},
		{"no file, not intercepted", noFile, unheard, plain},
		{"API, cluster-ip", apiWithoutService, "the cluster has no such Service", clusterIP},
		{"API, not intercepted", apiWithoutService, "the cluster has no such Service", plain},
		{"API away, cluster-ip", apiAway, unheard, clusterIP},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			n.noVariable = true
			kubernetes, appear := c.source(n)
			config := []string{"kubernetes: " + kubernetes, "guard: {enabled: false}"}
			intercepts := c.v.name != ""
			if !intercepts {
				config = append(config, "listen: [127.0.0.1]")
			}
			for _, appears := range []bool{false, true} {
				d := c.v.launch(n, "a", config...)
				d.waits(c.why)
				if left := n.leftovers(); left != nil {
					t.Errorf("made before there is anybody to ask: %v", left)
				}
				if n.taken(n.pod, clusterIP4) {
					t.Error("queries are taken")
				}
				// Nobody is there, and the port says so: a client's next server is asked at once.
				err := n.ask(n.Node.Namespace, "udp", loopback53, cachedName)
				if !intercepts && !errors.Is(err, lab.ErrRefused) {
					t.Errorf("127.0.0.1 is asked: %v", err)
				}
				if !appears {
					d.ends(t)
					if left := n.leftovers(); left != nil {
						t.Errorf("left: %v", left)
					}
					continue
				}
				appear()
				start := time.Now()
				d.awaitReady()
				t.Logf("ready %v after the Service was there", time.Since(start))
				if got := d.metric("dnsguard_service_awaited"); got != 0 {
					t.Errorf("service_awaited is %v", got)
				}
				for _, server := range c.v.servers(n) {
					if !n.taken(n.pod, server) {
						t.Errorf("queries to %v are not taken", server)
					}
				}
				if !intercepts {
					if err := n.ask(n.Node.Namespace, "udp", loopback53, cachedName); err != nil {
						t.Error(err)
					}
				}
				d.saidOnce("waiting")
				if line := d.logged("msg=waiting", "ClusterIP of the Service"); line != "" {
					t.Errorf("the interception says it, too: %s", line)
				}
				if line := d.logged("level=ERROR"); line != "" {
					t.Error(line)
				}
				d.stop()
			}
		})
	}
}

// TestNodeAwaitsServiceInVain: what waiting cannot heal ends the process, with what is
// wrong.
func TestNodeAwaitsServiceInVain(t *testing.T) {
	plain := []string{"intercept: {mode: none}", "listen: [127.0.0.1]", "guard: {enabled: false}"}
	for _, c := range []struct {
		name   string
		config []string
		before func(*node)
		later  func(*node) // while it waits; nil: it does not
		want   []string
	}{
		{"an address that is not here", []string{"intercept: {mode: none}", "listen: [192.0.2.77]"}, nil, nil, []string{"192.0.2.77", "on no interface of this machine"}},
		{
			"an upstream that cannot be",
			append([]string{"upstreams: [{zones: [.], servers: [service]}, {zones: [corp.example], servers: [/nonexistent]}]"}, plain...),
			nil, nil,
			[]string{"/nonexistent"},
		},
		{"an address that somebody has", []string{"intercept: {mode: link-local}"}, (*node).holdLinkLocal, nil, []string{linkLocal4.Addr().String(), "interface"}},
		{"the same, of several", []string{"intercept: {mode: cluster-ip}"}, (*node).holdLinkLocal, nil, []string{linkLocal4.Addr().String(), "interface"}},
		{"a port taken meanwhile", plain, nil, func(n *node) { n.hold(loopback53); n.tell(func(c *cluster) { c.noService = false }) }, []string{"127.0.0.1:53", "another process"}},
		{"an address taken meanwhile", []string{"intercept: {mode: cluster-ip}"}, nil, func(n *node) {
			n.holdLinkLocal()
			n.tell(func(c *cluster) { c.noService = false })
		}, []string{linkLocal4.Addr().String(), "interface"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			n.noVariable = true
			n.tell(func(c *cluster) { c.noService = true })
			if c.before != nil {
				c.before(n)
			}
			d := n.launch("a", c.config...)
			if c.later != nil {
				d.waits("the cluster has no such Service")
				c.later(n)
			}
			select {
			case <-d.proc.Done():
			case <-time.After(eventually):
				d.kill()
				t.Fatal("does not end")
			}
			var exit interface{ ExitCode() int }
			if err := d.proc.Err(); !errors.As(err, &exit) || exit.ExitCode() != exitWrong {
				t.Errorf("ended: %v", err)
			}
			if d.logged(append([]string{"dnsguard run: "}, c.want...)...) == "" {
				t.Errorf("no line with %q:\n%s", c.want, d.log)
			}
			if left := n.leftovers(); left != nil {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestNodeAwaitsServiceReloads: a configuration that names servers is in use at once,
// and one that is wrong is refused, while the Service is waited for, from the first
// moment on. A daemon that answers is not made to wait.
func TestNodeAwaitsServiceReloads(t *testing.T) {
	n := newNode(t)
	n.noVariable = true
	n.tell(func(c *cluster) { c.noService = true })
	d := n.launch("a", guardOnly()...)
	defer d.stop()
	d.awaitLog("msg=starting")
	d.signal(syscall.SIGHUP) // does not end who is not there to hear it yet
	d.waits("the cluster has no such Service")
	rewrite := func(more ...string) {
		t.Helper()
		d.rewrite(append(guardOnly(), more...)...)
	}
	rewrite("listen: [192.0.2.77]")
	await(t, "the address to be refused", func() bool {
		return strings.Contains(d.page("/readyz"), "configuration was refused") && strings.Contains(d.page("/readyz"), "192.0.2.77")
	})
	rewrite("cache: {size: 1Mi}")
	await(t, "another configuration, that waits too", func() bool {
		page := d.page("/readyz")
		return d.metric("dnsguard_cache_limit_bytes") == 1<<20 && !strings.Contains(page, "refused") && strings.Contains(page, "upstream: waiting: ")
	})
	<-time.After(2500 * time.Millisecond) // it is tried every second
	d.saidOnce("waiting")
	rewrite(fmt.Sprintf("upstreams: [{servers: [%v]}]", n.dns[0].IP4))
	d.awaitReady()
	if err := n.ask(n.Node.Namespace, "udp", loopback53, cachedName); err != nil {
		t.Error(err)
	}
	rewrite()
	await(t, "the unknown Service to be refused", func() bool {
		return strings.Contains(d.page("/readyz"), "in use: upstreams: the address of the Service kube-system/kube-dns is not known")
	})
	if err := n.ask(n.Node.Namespace, "udp", loopback53, "other.uncached.example.com."); err != nil {
		t.Error(err)
	}
}

// waits awaits the state in which the Service is waited for, and checks that it is
// said wherever an operator looks.
func (d *guardd) waits(why string) {
	d.t.Helper()
	reason := "upstream: waiting: the address of the Service kube-system/kube-dns is not known: " + why
	last := ""
	await(d.t, "waiting for the Service, "+why, func() bool {
		last = d.page("/readyz")
		return strings.Contains(last, reason)
	})
	if page := d.page("/healthz"); page != "ok" {
		d.t.Errorf("/healthz: %s", page)
	}
	if page := d.page("/statusz"); !strings.Contains(page, reason) {
		d.t.Errorf("/statusz does not say what is waited for:\n%s", page)
	}
	if awaited, ready := d.metric("dnsguard_service_awaited"), d.metric("dnsguard_ready"); awaited != 1 || ready != 0 {
		d.t.Errorf("service_awaited is %v, ready %v", awaited, ready)
	}
	if code, out := d.n.command("health", "--control", d.control); code != exitOK {
		d.t.Errorf("health: code %d: %s", code, out)
	}
	if code, out := d.n.command("health", "--ready", "--control", d.control); code != exitWrong || !strings.Contains(out, reason) {
		d.t.Errorf("health --ready: code %d: %s", code, out)
	}
	if code, out := d.n.command("explain", "www.example.com.", "--control", d.control); code != exitWrong || !strings.Contains(out, "nobody can be asked yet: the address of the Service") {
		d.t.Errorf("explain: code %d: %s", code, out)
	}
}

// ends has SIGTERM end the process in order, and soon: nothing is under way.
func (d *guardd) ends(t *testing.T) {
	t.Helper()
	start := time.Now()
	d.stop()
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("ended %v after SIGTERM", took)
	}
}

// saidOnce checks that no line of a message is logged twice.
func (d *guardd) saidOnce(message string) {
	d.t.Helper()
	seen := map[string]bool{}
	for line := range strings.Lines(d.log.String()) {
		_, text, found := strings.Cut(line, " msg="+message)
		if found && seen[text] {
			d.t.Errorf("logged again: %s", line)
		}
		seen[text] = seen[text] || found
	}
	if len(seen) < 2 { // and the lines of other messages
		d.t.Errorf("no line of %q:\n%s", message, d.log)
	}
}

// fileWithoutService is a file in which the Service is missing.
func fileWithoutService(n *node) (kubernetes string, appear func()) {
	n.tell(func(c *cluster) { c.noService = true })
	return fmt.Sprintf("{source: file, file: %s, nodeName: node1}", n.clusterFile()), func() {
		n.tell(func(c *cluster) { c.noService = false })
	}
}

// noFile is one that does not exist yet.
func noFile(n *node) (kubernetes string, appear func()) {
	file := filepath.Join(n.dir, "late.yaml")
	return fmt.Sprintf("{source: file, file: %s, nodeName: node1}", file), func() { n.cluster.write(file) }
}

// apiWithoutService is an API server that knows no Service.
func apiWithoutService(n *node) (kubernetes string, appear func()) {
	api := newServiceAPI(n)
	api.serve()
	return api.config(), api.create
}

// apiAway is an API server that nobody reaches, until it knows the Service.
func apiAway(n *node) (kubernetes string, appear func()) {
	api := newServiceAPI(n)
	return api.config(), func() {
		api.create()
		api.serve()
	}
}

// serviceAPI is an API server on the node, of one Service that is there or not.
type serviceAPI struct {
	n       *node
	addr    netip.AddrPort
	created context.Context // ends when the Service is there
	create  context.CancelFunc
}

func newServiceAPI(n *node) *serviceAPI {
	a := &serviceAPI{n: n, addr: netip.MustParseAddrPort("127.0.0.1:6443")}
	a.created, a.create = context.WithCancel(context.Background())
	n.t.Cleanup(a.create)
	return a
}

// config is the group kubernetes for who asks it.
func (a *serviceAPI) config() string {
	file := filepath.Join(a.n.dir, "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: 'http://%v'}}]\nusers: [{name: u, user: {token: t}}]\n", a.addr)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		a.n.t.Fatal(err)
	}
	return fmt.Sprintf("{source: api, kubeconfig: %s, nodeName: node1}", file)
}

// serve answers from now on.
func (a *serviceAPI) serve() {
	a.n.t.Helper()
	l, err := a.n.Node.Listen(a.n.t.Context(), "tcp", a.addr.String())
	if err != nil {
		a.n.t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(a.answer), ReadHeaderTimeout: time.Minute, BaseContext: func(net.Listener) context.Context { return a.n.t.Context() }}
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	a.n.t.Cleanup(func() {
		_ = s.Close()
		serving.Wait()
	})
}

// answer answers a reflector: lists of what there is, and watches.
func (a *serviceAPI) answer(w http.ResponseWriter, r *http.Request) {
	resource, query := path.Base(r.URL.Path), r.URL.Query()
	send := func(v any) { _ = json.NewEncoder(w).Encode(v) } // the client went
	w.Header().Set("Content-Type", "application/json")
	type object = map[string]any
	service := object{
		"apiVersion": "v1", "kind": "Service", "metadata": object{"name": "kube-dns", "namespace": "kube-system", "resourceVersion": "2"},
		"spec": object{
			"clusterIP": clusterIP4.Addr().String(), "clusterIPs": []string{clusterIP4.Addr().String(), clusterIP6.Addr().String()},
			"ports": []object{{"name": "dns", "protocol": "UDP", "port": 53}, {"name": "dns-tcp", "protocol": "TCP", "port": 53}},
		},
	}
	switch {
	case query.Get("sendInitialEvents") != "": // an older server, which is asked for a list then
		w.WriteHeader(http.StatusUnprocessableEntity)
		send(object{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Invalid", "code": http.StatusUnprocessableEntity, "message": "sendInitialEvents is forbidden"})
	case query.Get("watch") != "":
		_ = http.NewResponseController(w).Flush()
		if resource == "services" && query.Get("resourceVersion") == "1" {
			select {
			case <-a.created.Done():
				send(object{"type": "ADDED", "object": service})
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
			}
		}
		<-r.Context().Done()
	default:
		kinds := map[string]string{"services": "Service", "pods": "Pod", "namespaces": "Namespace"}
		list := object{"apiVersion": "v1", "kind": kinds[resource] + "List", "metadata": object{"resourceVersion": "1"}, "items": []object{}}
		if resource == "services" && a.created.Err() != nil {
			list["metadata"], list["items"] = object{"resourceVersion": "2"}, []object{service}
		}
		send(list)
	}
}

// hold has somebody else listen on an address of the node.
func (n *node) hold(addr netip.AddrPort) {
	n.t.Helper()
	c, err := n.Node.ListenPacket(n.t.Context(), "udp", addr.String())
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = c.Close() })
}

// holdLinkLocal puts an address that is to be taken onto an interface.
func (n *node) holdLinkLocal() {
	n.t.Helper()
	err := n.Node.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(linkLocal4.Addr().String() + "/32")
		return errors.Join(err, netlink.AddrAdd(lo, addr))
	})
	if err != nil {
		n.t.Fatal(err)
	}
}
