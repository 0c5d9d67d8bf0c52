package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// eventually is how long a test waits for what must come, on a machine that is
// busy otherwise.
const eventually = time.Minute

// controlPlane is one for all tests: it takes the longest to start.
var controlPlane struct {
	once    sync.Once
	cluster *kubelab.Cluster
	err     error
	took    time.Duration
}

func TestMain(m *testing.M) {
	kubelab.Contain()
	code := m.Run()
	if c := controlPlane.cluster; c != nil {
		if err := c.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "close the control plane:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// buildLimit bounds the first build of the cluster's programs.
const buildLimit = 25 * time.Minute

// cluster returns the control plane, and starts it the first time.
func cluster(t *testing.T) *kubelab.Cluster {
	t.Helper()
	labtest.Require(t)
	c := &controlPlane
	c.once.Do(func() {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
		defer cancel()
		components, err := kubelab.Build(ctx, "..", os.Stderr)
		if err != nil {
			c.err = err
			return
		}
		t.Logf("programs: %v", time.Since(begin).Round(time.Second))
		begin = time.Now()
		ctx, cancel = context.WithTimeout(context.Background(), 2*eventually)
		defer cancel()
		c.cluster, c.err = kubelab.Start(ctx, components)
		t.Logf("control plane: %v", time.Since(begin).Round(100*time.Millisecond))
	})
	if c.err != nil {
		t.Fatal(c.err)
	}
	return c.cluster
}

// world is two nodes with kube-proxy and a CoreDNS each, and a client pod on the
// first, in the control plane that all tests share.
type world struct {
	*kubelab.Cluster
	t      *testing.T
	nodes  []*kubelab.Node
	dns    []*kubelab.Pod
	client *kubelab.Pod
	number int
	made   *atomic.Int32    // CoreDNS pods ever
	met    map[meeting]bool // what has answered the guards
	port   int              // that they listen on
}

var worlds int

// newWorld builds one, with the nodes' modes of kube-proxy, or one for both. Nodes are
// new: no rule and no flow of another test is there.
func newWorld(t *testing.T, modes ...string) *world {
	t.Helper()
	return newWorldAt(t, 53, modes...)
}

// newWorldAt builds one whose CoreDNS pods listen on another port.
func newWorldAt(t *testing.T, port int, modes ...string) *world {
	t.Helper()
	w := &world{Cluster: cluster(t), t: t, number: worlds, made: new(atomic.Int32), port: port, met: map[meeting]bool{}}
	worlds++
	begin := time.Now()
	ctx := w.soon()
	t.Cleanup(w.close)
	for i := range 2 {
		n, err := w.AddNode(ctx, fmt.Sprintf("node%d-%d", w.number, i+1))
		w.must(err)
		w.nodes = append(w.nodes, n)
	}
	w.each(len(w.nodes), func(i int) error { return w.nodes[i].StartProxy(ctx, modes[i%len(modes)]) })
	w.dns = make([]*kubelab.Pod, len(w.nodes))
	w.each(len(w.nodes), func(i int) (err error) {
		w.dns[i], err = w.nodes[i].AddCoreDNS(ctx, fmt.Sprintf("coredns-%d-%d", w.number, i), port)
		return err
	})
	w.made.Store(int32(len(w.dns)))
	w.client = w.addPod(w.nodes[0], "client")
	w.awaitServing(w.dns...)
	t.Logf("two nodes with kube-proxy (%s) and CoreDNS: %v", strings.Join(modes, ", "), time.Since(begin).Round(100*time.Millisecond))
	return w
}

// in is the world as a subtest uses it.
func (w *world) in(t *testing.T) *world {
	c := *w
	c.t = t
	return &c
}

// restore puts a new CoreDNS in the place of each that is gone.
func (w *world) restore() {
	w.t.Helper()
	for i, d := range w.dns {
		if !d.Running() {
			w.dns[i] = w.addDNS(w.nodes[i])
		}
	}
	w.awaitServing(w.dns...)
}

// soon is a context that ends when what must come has not come.
func (w *world) soon() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), eventually)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// each runs f for 0 to n-1 at the same time.
func (w *world) each(n int, f func(i int) error) {
	w.t.Helper()
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	w.must(errors.Join(errs...))
}

// close ends the world; its programs' logs tell what went wrong in it.
func (w *world) close() {
	if w.t.Failed() {
		w.t.Logf("control plane:\n%s", w.Logs(15))
		for _, n := range w.nodes {
			w.t.Logf("%s:\n%s", n.Name, n.Logs(40))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), eventually)
	defer cancel()
	if !w.APIRunning() {
		if err := w.StartAPI(ctx); err != nil {
			w.t.Error(err)
		}
	}
	for _, n := range w.nodes {
		if err := n.Close(ctx); err != nil {
			w.t.Errorf("close %s: %v", n.Name, err)
		}
	}
}

func (w *world) addPod(n *kubelab.Node, name string) *kubelab.Pod {
	w.t.Helper()
	p, err := n.AddPod(w.soon(), "default", fmt.Sprintf("%s-%d", name, w.number), map[string]string{"app": name})
	w.must(err)
	return p
}

// addDNS adds a CoreDNS pod on a node.
func (w *world) addDNS(n *kubelab.Node) *kubelab.Pod {
	w.t.Helper()
	p, err := n.AddCoreDNS(w.soon(), fmt.Sprintf("coredns-%d-%d", w.number, w.made.Add(1)), w.port)
	w.must(err)
	return p
}

// await looks until ok is nil.
func (w *world) await(what string, ok func(context.Context) error) time.Duration {
	w.t.Helper()
	begin := time.Now()
	w.must(kubelab.Await(w.soon(), what, ok))
	return time.Since(begin)
}

// awaitServing waits until exactly these pods are what the cluster and every
// node's rules know as kube-dns.
func (w *world) awaitServing(pods ...*kubelab.Pod) {
	w.t.Helper()
	w.await("EndpointSlices of kube-dns", func(ctx context.Context) error {
		got := map[string]bool{}
		for _, e := range w.endpoints(ctx) {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				got[e.Addresses[0]] = true
			}
		}
		want := 0
		for _, p := range pods {
			for _, a := range []netip.Addr{p.IP4, p.IP6} {
				want++
				if !got[a.String()] {
					return fmt.Errorf("%v is not ready: %v", a, got)
				}
			}
		}
		if len(got) != want {
			return fmt.Errorf("also ready: %v", got)
		}
		return nil
	})
	for _, n := range w.nodes {
		w.await("kube-proxy's rules on "+n.Name, func(ctx context.Context) error {
			for _, p := range pods {
				for _, a := range []netip.Addr{p.IP4, p.IP6} {
					if ok, err := leadsTo(ctx, n, a); !ok {
						return errors.Join(fmt.Errorf("nothing leads to %v", a), err)
					}
				}
			}
			return nil
		})
	}
}

// endpoints are those of kube-dns in all slices.
func (w *world) endpoints(ctx context.Context) []discoveryv1.Endpoint {
	slices, err := w.Discovery.EndpointSlices("kube-system").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kube-dns"})
	if err != nil {
		return nil
	}
	var all []discoveryv1.Endpoint
	for _, s := range slices.Items {
		all = append(all, s.Endpoints...)
	}
	return all
}

// leadsTo tells whether kube-proxy's rules on the node send DNS to an address.
func leadsTo(ctx context.Context, n *kubelab.Node, a netip.Addr) (bool, error) {
	var out string
	var err error
	switch {
	case n.Proxy.Mode == "nftables" && a.Is4():
		out, err = kubelab.Output(ctx, n.Namespace, "nft", "list", "table", "ip", "kube-proxy")
	case n.Proxy.Mode == "nftables":
		out, err = kubelab.Output(ctx, n.Namespace, "nft", "list", "table", "ip6", "kube-proxy")
	case a.Is4():
		out, err = kubelab.Output(ctx, n.Namespace, "iptables-save", "-t", "nat")
	default:
		out, err = kubelab.Output(ctx, n.Namespace, "ip6tables-save", "-t", "nat")
	}
	// "to 10.244.1.2:53", "to [fd00::2]:53", "map { 0 : 10.244.1.2 . 53, ...": the
	// port is what the pod has.
	with := strings.TrimSuffix(netip.AddrPortFrom(a, 0).String(), "0")
	for line := range strings.Lines(out) {
		if strings.Contains(strings.ToLower(line), "dnat") && (strings.Contains(line, " "+with) || strings.Contains(line, fmt.Sprintf(" %v . ", a))) {
			return true, err
		}
	}
	return false, err
}

// ask asks a server once from a namespace and returns the answer, which must be a
// good one.
func (w *world) ask(ns *lab.Namespace, network string, server netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
	defer cancel()
	m, err := lab.Ask(ctx, ns, network, server, name, qtype)
	if err == nil && (m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0) {
		err = fmt.Errorf("%s %s over %s: %s with %d records", name, dns.TypeToString[qtype], network, dns.RcodeToString[m.Rcode], len(m.Answer))
	}
	return m, err
}

// guard starts dnsguard on a node, ready.
func (w *world) guard(n *kubelab.Node, more ...string) *kubelab.Guard {
	w.t.Helper()
	maps.DeleteFunc(w.met, func(m meeting, _ bool) bool { return m.node == n.Name })
	g, err := n.StartGuard(w.soon(), more...)
	w.must(err)
	return g
}

// figures are those of dnsguard's counters that tell why a query failed.
func (w *world) figures(g *kubelab.Guard) string {
	page, err := g.Page(w.soon(), "/metrics")
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for line := range strings.Lines(page) {
		for _, name := range []string{"responses", "shed", "upstream_failures", "upstream_queries", "budget", "socket_drops", "hedges", "withdrawals", "repairs", "hits", "misses"} {
			if strings.HasPrefix(line, "dnsguard_") && strings.Contains(line, name) && !strings.HasSuffix(line, " 0\n") {
				b.WriteString(line)
				break
			}
		}
	}
	return b.String()
}

// apiName exists in every cluster.
const apiName = "kubernetes.default.svc.cluster.local."
