package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
)

// linkLocal is the address of the overlays that have one.
var linkLocal = netip.MustParseAddrPort("169.254.20.10:53")

// definitions are the kinds that others bring to a cluster, as far as what is applied
// needs them: the API server knows their names, and takes any fields.
const definitions = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.%[2]s}
spec:
  group: %[2]s
  scope: Namespaced
  names: {plural: %[1]s, kind: %[3]s}
  versions:
    - name: %[4]s
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// overlay is what one is for, on a node.
type overlay struct {
	name  string
	takes []netip.AddrPort // the addresses whose queries it takes
	nodes int              // that it runs on; 0: all
	check func(w *world, guards []*kubelab.Guard)
}

// TestOverlays: the API server takes every overlay and the chart as they are
// rendered, over each other and by its own rules (fields that do not exist, values
// that it refuses). Those whose dataplane is here are run as the DaemonSet controller
// and their pods' objects say, and do what they are for: answers come, and the
// addresses that they say are taken, and no other. Neither IPVS nor Cilium nor RKE2 is
// here: theirs are applied only.
func TestOverlays(t *testing.T) {
	w := newWorld(t, "iptables")
	build, cancel := context.WithTimeout(t.Context(), buildLimit)
	defer cancel()
	rendered, err := kubelab.Render(build, "..")
	w.must(err)
	applied := map[kubelab.Object]bool{}
	apply := func(manifest []byte) {
		t.Helper()
		_, err := w.Apply(w.soon(), manifest, true)
		w.must(err)
		objects, err := w.Apply(w.soon(), manifest, false)
		for _, o := range objects {
			applied[o] = true
		}
		w.must(err)
	}
	ds := kubelab.Object{APIVersion: "apps/v1", Kind: "DaemonSet"}
	ds.Metadata.Name, ds.Metadata.Namespace = "dnsguard", "kube-system"
	daemons := w.PlayDaemons(w.nodes...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), eventually)
		defer cancel()
		// Kinds last: what is of them goes first.
		for _, o := range slices.SortedFunc(maps.Keys(applied), func(a, b kubelab.Object) int { return strings.Compare(b.APIVersion, a.APIVersion) }) {
			if err := w.Delete(ctx, o); err != nil && !(o == ds && strings.Contains(err.Error(), "404")) {
				t.Error(err)
			}
		}
		if err := daemons.Close(ctx); err != nil {
			t.Error(err)
		}
	})

	overlays := []overlay{
		{name: "canary", takes: []netip.AddrPort{kubelab.DNS4, kubelab.DNS6}, nodes: 1},
		{name: "guard-dry-run", check: (*world).dryRun},
		{name: "istio", takes: []netip.AddrPort{kubelab.DNS4, kubelab.DNS6}, check: (*world).countsPackets},
		{name: "iptables", takes: []netip.AddrPort{kubelab.DNS4, kubelab.DNS6}, check: (*world).byIPTables},
		{name: "nodelocaldns", takes: []netip.AddrPort{kubelab.DNS4, kubelab.DNS6, linkLocal}},
		{name: "link-local", takes: []netip.AddrPort{linkLocal}},
		{name: "remove", check: (*world).nothingLeft},
	}
	label := func(value string) {
		patch := fmt.Appendf(nil, `{"metadata": {"labels": {"dnsguard.io/canary": %s}}}`, value)
		w.must(w.Do(w.soon(), http.MethodPatch, "/api/v1/nodes/"+w.nodes[0].Name, string(types.MergePatchType), patch, nil))
	}
	label(`"true"`)
	for _, o := range overlays {
		t.Run(o.name, func(t *testing.T) {
			w := w.in(t)
			begin := time.Now()
			apply(rendered[o.name])
			nodes := len(w.nodes)
			if o.nodes > 0 {
				nodes = o.nodes
			}
			w.await("dnsguard on its nodes", func(context.Context) error {
				if n := len(daemons.Guards()); n != nodes {
					return fmt.Errorf("on %d of %d", n, nodes)
				}
				return nil
			})
			guards := daemons.Guards()
			for _, g := range guards {
				w.must(g.AwaitReady(w.soon()))
			}
			took := time.Since(begin)
			w.takes(guards[0], o.takes)
			if o.check != nil {
				o.check(w, guards)
			}
			t.Logf("overlay %s: ready on %d nodes after %v; takes %v", o.name, len(guards), took.Round(100*time.Millisecond), o.takes)
			w.must(w.Delete(w.soon(), ds))
			w.must(daemons.End(w.soon()))
		})
		if t.Failed() {
			return
		}
	}
	label("null")
	for _, o := range overlays {
		delete(rendered, o.name)
	}

	// What is only applied must run nowhere.
	label(`null, "kubernetes.io/os": null`)
	other := fmt.Appendf(nil, `{"metadata": {"labels": {"kubernetes.io/os": null}}}`)
	w.must(w.Do(w.soon(), http.MethodPatch, "/api/v1/nodes/"+w.nodes[1].Name, string(types.MergePatchType), other, nil))
	for _, d := range [][4]string{
		{"ciliumlocalredirectpolicies", "cilium.io", "CiliumLocalRedirectPolicy", "v2"},
		{"podmonitors", "monitoring.coreos.com", "PodMonitor", "v1"},
		{"prometheusrules", "monitoring.coreos.com", "PrometheusRule", "v1"},
	} {
		apply(fmt.Appendf(nil, definitions, d[0], d[1], d[2], d[3]))
		w.await(d[2], func(ctx context.Context) error {
			return w.Do(ctx, http.MethodGet, "/apis/"+d[1]+"/"+d[3]+"/"+d[0], "", nil, nil)
		})
	}
	for _, file := range []string{"podmonitor.yaml", "prometheusrule.yaml"} {
		data, err := os.ReadFile(filepath.Join("..", "deploy", "monitoring", file))
		w.must(err)
		apply(data)
	}
	for _, name := range slices.Sorted(maps.Keys(rendered)) {
		apply(rendered[name])
	}
	t.Logf("applied only: %v, monitoring", slices.Sorted(maps.Keys(rendered)))
	if left := daemons.Guards(); len(left) > 0 {
		t.Errorf("%d pods run", len(left))
	}
}

// takes checks which addresses dnsguard takes, by what it says and by the kernel's
// table of flows: what is taken has none.
func (w *world) takes(g *kubelab.Guard, want []netip.AddrPort) {
	w.t.Helper()
	for _, a := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6, linkLocal} {
		expected := slices.Contains(want, a)
		active, err := g.Metric(w.soon(), "dnsguard_intercept_active", fmt.Sprintf("address=%q", a.String()))
		w.must(err)
		if (active == 1) != expected {
			w.t.Errorf("%v: active %v", a, active)
		}
		if a == linkLocal && !expected {
			continue // nobody answers there
		}
		for _, network := range []string{"udp", "tcp"} {
			if _, err := w.ask(w.client.Namespace, network, a, apiName, 1); err != nil {
				w.t.Errorf("%v: %v", a, err)
			}
		}
		tracked, err := w.tracked(a)
		w.must(err)
		if tracked == expected {
			w.t.Errorf("%v: queries of the pod are tracked: %v", a, tracked)
		}
	}
}

// tracked tells whether a question of the client pod leaves a flow on its node.
func (w *world) tracked(server netip.AddrPort) (bool, error) {
	asked := make(chan error, 1)
	client, err := lab.NewPinnedClient(w.t.Context(), w.client.Namespace, lab.ClientConfig{
		Server: server, Interval: pinnedInterval, Timeout: time.Second,
		Name: func(int) string { return apiName },
		Observe: func(o lab.Outcome) {
			select {
			case asked <- o.Err:
			default:
			}
		},
	})
	if err != nil {
		return false, err
	}
	ctx, stop := context.WithTimeout(w.t.Context(), eventually)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.Run(ctx)
	}()
	select {
	case err = <-asked:
	case <-ctx.Done():
		err = ctx.Err()
	}
	stop()
	<-ended
	_, ok, flowErr := w.nodes[0].FlowOf(client.Local, server)
	return ok, errors.Join(err, flowErr, client.Close())
}

// dryRun: a flow to a CoreDNS that is gone is told of and left where it is.
func (w *world) dryRun(guards []*kubelab.Guard) {
	g := guards[0]
	p := w.pin(side{w.nodes[0], w.client}, kubelab.DNS4, nil)
	defer p.stop()
	// Else kube-proxy deletes the flow.
	w.must(w.nodes[0].Proxy.Signal(syscall.SIGSTOP))
	w.must(p.leads.Die())
	w.must(p.leads.Delete(w.soon(), 0))
	port := fmt.Sprintf(":%d", p.Local.Port())
	w.await("the guard's word", func(context.Context) error {
		if g.Log.Line("flow would be deleted", port) == "" {
			return errors.New("not said")
		}
		return nil
	})
	f, ok, err := w.nodes[0].FlowOf(p.Local, kubelab.DNS4)
	w.must(err)
	if !ok || f.Endpoint.Addr() != p.leads.IP4 {
		w.t.Errorf("the flow is not there any more: %v", f)
	}
	deleted, err := g.Metric(w.soon(), "dnsguard_guard_deleted_total")
	w.must(err)
	if deleted != 0 {
		w.t.Errorf("%v flows deleted", deleted)
	}
	w.must(w.nodes[0].Proxy.Signal(syscall.SIGCONT))
	w.restore()
}

// countsPackets: guard.evidence is at work.
func (w *world) countsPackets(guards []*kubelab.Guard) {
	for _, g := range guards {
		if _, err := kubelab.Output(w.soon(), g.Node.Namespace, "nft", "list", "table", "inet", "dnsguard-accounting"); err != nil {
			w.t.Error(err)
		}
	}
}

// byIPTables: the rules are those of iptables' legacy variant, as in the image, and
// the capabilities what that needs.
func (w *world) byIPTables(guards []*kubelab.Guard) {
	for _, g := range guards {
		for _, save := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
			out, err := kubelab.Output(w.soon(), g.Node.Namespace, save, "-t", "raw")
			w.must(err)
			if !strings.Contains(out, "DNSGUARD-TAKE") {
				w.t.Errorf("%s on %s has no rules of ours:\n%s", save, g.Node.Name, out)
			}
		}
		if out, err := kubelab.Output(w.soon(), g.Node.Namespace, "nft", "list", "tables"); err != nil || strings.Contains(out, "dnsguard") {
			w.t.Errorf("tables of nftables: %s, %v", out, err)
		}
		w.confined(g, "0000000000003400")
	}
}

// nothingLeft: cleanup has removed what outlived the process before, and nothing is
// added.
func (w *world) nothingLeft(guards []*kubelab.Guard) {
	for _, g := range guards {
		out, err := kubelab.Output(w.soon(), g.Node.Namespace, "nft", "list", "tables")
		w.must(err)
		rules, err := kubelab.Output(w.soon(), g.Node.Namespace, "ip", "rule")
		w.must(err)
		if strings.Contains(out, "dnsguard") || strings.Contains(rules, "5353") {
			w.t.Errorf("left on %s:\n%s%s", g.Node.Name, out, rules)
		}
		w.confined(g, "0000000000000000")
	}
}

// confined checks a container's capabilities, as /proc shows them.
func (w *world) confined(g *kubelab.Guard, capabilities string) {
	w.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.Pid()))
	w.must(err)
	for _, want := range []string{"CapEff:\t" + capabilities, "CapBnd:\t" + capabilities, "NoNewPrivs:\t1"} {
		if !strings.Contains(string(status), want) {
			w.t.Errorf("%s is not confined: no %q in\n%s", g.Name, want, status)
		}
	}
}
