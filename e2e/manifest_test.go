package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// capabilities are NET_BIND_SERVICE and NET_ADMIN, as /proc shows them.
const capabilities = "0000000000001400"

// daemonSetPath is where the API server has dnsguard's.
const daemonSetPath = "/apis/apps/v1/namespaces/kube-system/daemonsets/dnsguard"

// TestManifest: deploy/daemonset.yaml applies as it is. The DaemonSet controller
// makes its pods; what they say is run: their command line, their configuration,
// with their ServiceAccount's token and RBAC, their capabilities, their probes.
// Then it is upgraded under load, and meets bad input: pods are answered all the time,
// the reason is said, and it heals by itself.
func TestManifest(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	manifest, err := os.ReadFile("../deploy/daemonset.yaml")
	w.must(err)
	applied, err := w.Apply(w.soon(), manifest, true)
	w.must(err)
	t.Logf("server-side dry run: %v", applied)
	daemons := w.PlayDaemons(w.nodes...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), eventually)
		defer cancel()
		for _, o := range applied {
			if err := w.Delete(ctx, o); err != nil {
				t.Error(err)
			}
		}
		if err := daemons.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	begin := time.Now()
	_, err = w.Apply(w.soon(), manifest, false)
	w.must(err)
	w.awaitRollout(1)
	t.Logf("applied; ready on both nodes, as the DaemonSet controller sees it, %v later", time.Since(begin).Round(100*time.Millisecond))

	for _, g := range daemons.Guards() {
		w.confined(g, capabilities)
		if line := g.Log.Line("forbidden"); line != "" {
			t.Errorf("%s lacks a right: %s", g.Name, line)
		}
	}
	for _, server := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6} {
		for _, network := range []string{"udp", "tcp"} {
			if _, err := w.ask(w.client.Namespace, network, server, apiName, 1); err != nil {
				t.Error(err)
			}
		}
	}
	taken, err := daemons.Guards()[0].Metric(w.soon(), "dnsguard_cache_hits_total")
	w.must(err)
	if taken == 0 {
		t.Error("dnsguard takes nothing")
	}

	t.Run("upgrade", func(t *testing.T) {
		w := w.in(t)
		wait := w.drive(w.streams(15*time.Second, patience))
		old := daemons.Guards()
		w.rollOut()
		begin := time.Now()
		w.awaitRollout(2)
		took := time.Since(begin)
		lost, sent := wait()
		t.Logf("kubectl rollout restart: both nodes after %v; %d of %d lost", took.Round(100*time.Millisecond), lost, sent)
		if lost > 0 {
			t.Errorf("%d queries lost", lost)
		}
		for _, g := range old {
			if g.Running() == nil {
				t.Errorf("%s still runs", g.Name)
			}
		}
	})

	for _, c := range []struct {
		name string
		play func(*world, *kubelab.Daemons, []byte)
	}{
		{"missing rights", (*world).missingRights},
		{"mistake", (*world).mistake},
		{"wrong node name", (*world).wrongNode},
		{"no Service", (*world).noService},
	} {
		t.Run(c.name, func(t *testing.T) { c.play(w.in(t), daemons, manifest) })
	}
}

// Where the API server has what the cases of bad input change.
const (
	rolePath        = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/dnsguard"
	clusterRolePath = "/apis/rbac.authorization.k8s.io/v1/clusterroles/dnsguard"
)

// missingRights takes all rights away and has the controller replace a pod: the new one
// is not ready, says which verb and resource it lacks, and the next one when it gets
// that, answers all the same, and is ready when it has all.
func (w *world) missingRights(daemons *kubelab.Daemons, manifest []byte) {
	t := w.t
	for _, path := range []string{rolePath, clusterRolePath} {
		w.must(w.Do(w.soon(), http.MethodPatch, path, string(types.MergePatchType), []byte(`{"rules": []}`), nil))
	}
	g := w.replacePod(daemons)
	lacks := regexp.MustCompile(`cannot (?:list|watch) resource "([a-z]+)"`)
	var said []string
	for _, grant := range []func(){
		func() {
			w.must(w.Do(w.soon(), http.MethodPatch, rolePath, string(types.MergePatchType), []byte(`{"rules": [
				{"apiGroups": [""], "resources": ["services"], "resourceNames": ["kube-dns"], "verbs": ["list", "watch"]}]}`), nil))
		},
		func() {
			_, err := w.Apply(w.soon(), manifest, false)
			w.must(err)
		},
	} {
		w.await("a right that it lacks, another than "+strings.Join(said, ", "), func(ctx context.Context) error {
			page, err := g.Page(ctx, "/readyz")
			m := lacks.FindStringSubmatch(page)
			if err != nil || m == nil || slices.Contains(said, m[1]) {
				return fmt.Errorf("/readyz says %q, %w", page, err)
			}
			said = append(said, m[1])
			return nil
		})
		w.answered("with a right missing")
		grant()
	}
	w.must(g.AwaitReady(w.soon()))
	t.Logf("without rights: pods are answered, /readyz names list or watch of %s; ready when they are back", strings.Join(said, ", then "))
}

// mistake writes a configuration with a mistake into the ConfigMap: the running pods
// go on with the old one, not ready, with the reason. Then somebody rolls the
// DaemonSet all the same: the controller keeps an old pod only as long as that is
// ready, its successor cannot start, and queries take kube-proxy's path. All is well
// again by itself when the mistake is mended.
func (w *world) mistake(daemons *kubelab.Daemons, _ []byte) {
	t := w.t
	good, write := w.configuration(daemons)
	old := daemons.Guards()
	write(strings.Replace(good, "size: 32Mi", "size: plenty", 1))
	var reason string
	for _, g := range old {
		reason = w.says(g, "cache.size")
	}
	w.answered("with a mistake in the file")
	t.Logf("a mistake in the ConfigMap: pods are answered, /readyz says %q", reason)

	begin := time.Now()
	w.rollOut()
	w.await("the end of the old pods", func(context.Context) error {
		for _, g := range old {
			if g.Running() == nil {
				return fmt.Errorf("%s runs", g.Name)
			}
		}
		return nil
	})
	gone := time.Since(begin)
	w.await("successors that cannot start", func(context.Context) error {
		// Guards that run have not found the mistake yet.
		if n := len(daemons.Guards()); n > 0 {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
	w.answered("with no dnsguard")
	if tracked, err := w.tracked(kubelab.DNS4); err != nil || !tracked {
		t.Errorf("not on kube-proxy's path: %v, %v", tracked, err)
	}
	crashes := daemons.TakeCrashes()
	if len(crashes) == 0 {
		t.Error("no container ended by itself")
	}
	for _, text := range crashes {
		if !strings.Contains(text, "cache.size") {
			t.Errorf("a container ended without naming the mistake:\n%s", text)
		}
	}
	write(good)
	w.awaitDaemons(daemons)
	daemons.TakeCrashes() // those before the mistake was mended
	t.Logf("rolled in spite of it: the controller deletes the old pods, which end after %v; kube-proxy's path answers; ready by themselves when the mistake is mended", gone.Round(100*time.Millisecond))
}

// wrongNode gives the pods another node's name, of one that is not there and of one
// that is: the running pod asks for a restart, its successor is ready, answers, and says
// that the name is wrong.
func (w *world) wrongNode(daemons *kubelab.Daemons, _ []byte) {
	good, write := w.configuration(daemons)
	const restart = "only with a restart: kubernetes"
	var refused string
	var warnings []string
	for _, c := range []struct{ name, warning string }{
		{"nobody", `no pod is on node "nobody"`},
		{w.nodes[1].Name, fmt.Sprintf("no pod on node %q (kubernetes.nodeName, $NODE_NAME) has an address of this machine", w.nodes[1].Name)},
	} {
		write(strings.Replace(good, "source: api", "source: api\n  nodeName: "+c.name, 1))
		refused = w.says(daemons.Guards()[0], restart)
		g := w.replacePod(daemons)
		warnings = append(warnings, w.says(g, c.warning))
		w.must(g.AwaitReady(w.soon()))
		w.answered("with another node's name")
		if doubt, err := g.Metric(w.soon(), "dnsguard_node_name_in_doubt"); err != nil || doubt != 1 {
			w.t.Errorf("node_name_in_doubt is %v, %v", doubt, err)
		}
	}
	write(good)
	w.says(daemons.Guards()[0], restart)
	g := w.replacePod(daemons)
	w.must(g.AwaitReady(w.soon()))
	if page, err := g.Page(w.soon(), "/readyz"); err != nil || strings.Contains(page, "node") {
		w.t.Errorf("with the right name /readyz says %q, %v", page, err)
	}
	w.t.Logf("another node's name: %q until the restart, then pods are answered, ready, with the warnings %q", refused, warnings)
}

// noService deletes kube-dns. A pod that runs goes on with what it knows, and says
// what is missing; one that starts has no address to ask, says so and waits, until the
// Service is back, with the address that it had.
func (w *world) noService(daemons *kubelab.Daemons, _ []byte) {
	t := w.t
	runs := daemons.Guards()[1] // on the second node
	if _, err := w.ask(runs.Node.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Fatal(err)
	}
	restore, err := w.RemoveDNSService(w.soon())
	w.must(err)
	restore = sync.OnceValue(restore)
	t.Cleanup(func() {
		if err := restore(); err != nil {
			t.Error(err)
		}
	})
	missing := w.says(runs, "no such Service: kube-system/kube-dns")
	if _, err := w.ask(runs.Node.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Errorf("a known name, without the Service: %v", err)
	}
	g := w.replacePod(daemons)
	waits := w.says(g, "upstream: waiting: the address of the Service kube-system/kube-dns is not known: the cluster has no such Service")
	if page, err := g.Page(w.soon(), "/healthz"); err != nil || page != "ok\n" {
		t.Errorf("/healthz of the one that waits says %q, %v", page, err)
	}
	w.must(restore())
	w.awaitServing(w.dns...)
	w.must(g.AwaitReady(w.soon()))
	w.awaitDaemons(daemons)
	if crashes := daemons.TakeCrashes(); len(crashes) > 0 {
		t.Errorf("ended without the Service: %q", crashes)
	}
	w.answered("with the Service back")
	t.Logf("without kube-dns: a pod that runs answers what it knows and says %q; one that starts says %q, and is ready when the Service is back", missing, waits)
}

// awaitDaemons waits until a pod is ready on each node.
func (w *world) awaitDaemons(daemons *kubelab.Daemons) {
	w.t.Helper()
	w.await("a pod that is ready on each node", func(ctx context.Context) error {
		guards := daemons.Guards()
		if len(guards) != len(w.nodes) {
			return fmt.Errorf("%d run", len(guards))
		}
		for _, g := range guards {
			if page, err := g.Page(ctx, "/readyz"); err != nil || !strings.HasPrefix(page, "ok") {
				return fmt.Errorf("/readyz says %q, %w", page, err)
			}
		}
		return nil
	})
}

// answered checks that the client pod gets answers.
func (w *world) answered(when string) {
	w.t.Helper()
	for _, server := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6} {
		if _, err := w.ask(w.client.Namespace, "udp", server, apiName, 1); err != nil {
			w.t.Errorf("%s: %v", when, err)
		}
	}
}

// says waits until /readyz holds a text, and returns the line.
func (w *world) says(g *kubelab.Guard, text string) (line string) {
	w.t.Helper()
	w.await(g.Name+" to say "+text, func(ctx context.Context) error {
		page, err := g.Page(ctx, "/readyz")
		for l := range strings.Lines(page) {
			if strings.Contains(l, text) {
				line = strings.TrimSpace(l)
				return nil
			}
		}
		return fmt.Errorf("/readyz says %q, %w", page, err)
	})
	return line
}

// configuration returns what the ConfigMap holds, and a function that edits it and
// plays kubelet, which writes it out.
func (w *world) configuration(daemons *kubelab.Daemons) (text string, write func(string)) {
	w.t.Helper()
	m, err := w.Core.ConfigMaps("kube-system").Get(w.soon(), "dnsguard", metav1.GetOptions{})
	w.must(err)
	return m.Data["config.yaml"], func(config string) {
		w.t.Helper()
		patch, err := json.Marshal(map[string]any{"data": map[string]string{"config.yaml": config}})
		w.must(err)
		_, err = w.Core.ConfigMaps("kube-system").Patch(w.soon(), "dnsguard", types.MergePatchType, patch, metav1.PatchOptions{})
		w.must(err)
		w.must(daemons.SyncConfig(w.soon()))
	}
}

// replacePod deletes the pod on the first node, and returns its successor.
func (w *world) replacePod(daemons *kubelab.Daemons) *kubelab.Guard {
	w.t.Helper()
	old := daemons.Guards()[0]
	pods, err := w.Core.Pods("kube-system").List(w.soon(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=dnsguard", FieldSelector: "spec.nodeName=" + w.nodes[0].Name,
	})
	w.must(err)
	for _, p := range pods.Items {
		w.must(w.Core.Pods("kube-system").Delete(w.soon(), p.Name, metav1.DeleteOptions{}))
	}
	var young *kubelab.Guard
	w.await("a new pod", func(context.Context) error {
		young = daemons.Guards()[0]
		if young == old || young.Node != old.Node {
			return errors.New("the old one")
		}
		return nil
	})
	return young
}

// rollOut is kubectl rollout restart.
func (w *world) rollOut() {
	w.t.Helper()
	restart := fmt.Sprintf(`{"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": %q}}}}}`, time.Now().Format(time.RFC3339Nano))
	w.must(w.Do(w.soon(), http.MethodPatch, daemonSetPath, string(types.StrategicMergePatchType), []byte(restart), nil))
}

// awaitRollout waits until the DaemonSet of a generation is ready on all nodes, and
// nothing of an earlier one is left.
func (w *world) awaitRollout(generation int64) {
	w.t.Helper()
	w.await("the DaemonSet's rollout", func(ctx context.Context) error {
		var ds appsv1.DaemonSet
		if err := w.Do(ctx, http.MethodGet, daemonSetPath, "", nil, &ds); err != nil {
			return err
		}
		s, nodes := ds.Status, int32(len(w.nodes))
		if s.ObservedGeneration < generation || s.DesiredNumberScheduled != nodes || s.UpdatedNumberScheduled != nodes || s.NumberAvailable != nodes {
			return fmt.Errorf("%+v", s)
		}
		pods, err := w.Core.Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=dnsguard"})
		if err != nil || len(pods.Items) != len(w.nodes) {
			return fmt.Errorf("%d pods, %w", len(pods.Items), err)
		}
		return nil
	})
}
