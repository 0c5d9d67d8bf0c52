package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strings"
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
// Then it is upgraded under load, and given a configuration with a mistake.
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
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.Pid()))
		w.must(err)
		for _, want := range []string{"CapEff:\t" + capabilities, "CapBnd:\t" + capabilities, "NoNewPrivs:\t1"} {
			if !strings.Contains(string(status), want) {
				t.Errorf("%s is not confined: no %q in\n%s", g.Name, want, status)
			}
		}
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
		restart := fmt.Sprintf(`{"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": %q}}}}}`, time.Now().Format(time.RFC3339))
		w.must(w.Do(w.soon(), http.MethodPatch, daemonSetPath, string(types.StrategicMergePatchType), []byte(restart), nil))
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

	t.Run("missing right", func(t *testing.T) {
		w.in(t).missingRight(daemons, manifest)
	})

	t.Run("mistake", func(t *testing.T) {
		w := w.in(t)
		good, err := w.Core.ConfigMaps("kube-system").Get(w.soon(), "dnsguard", metav1.GetOptions{})
		w.must(err)
		write := func(config string) {
			patch, err := json.Marshal(map[string]any{"data": map[string]string{"config.yaml": config}})
			w.must(err)
			_, err = w.Core.ConfigMaps("kube-system").Patch(w.soon(), "dnsguard", types.MergePatchType, patch, metav1.PatchOptions{})
			w.must(err)
			w.must(daemons.SyncConfig(w.soon()))
		}
		write(strings.Replace(good.Data["config.yaml"], "size: 32Mi", "size: plenty", 1))
		g := daemons.Guards()[0]
		var reason string
		w.await("an unready pod", func(ctx context.Context) error {
			if reason, err = g.Page(ctx, "/readyz"); err != nil || !strings.Contains(reason, "cache.size") {
				return fmt.Errorf("/readyz says %q, %w", reason, err)
			}
			return nil
		})
		if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
			t.Errorf("with a mistake in the file: %v", err)
		}
		t.Logf("a mistake in the ConfigMap: pods are answered, /readyz says %q", strings.TrimSpace(reason))
		write(good.Data["config.yaml"])
		w.must(g.AwaitReady(w.soon()))
	})
}

// missingRight takes a right away and has the controller replace a pod: the new one
// is not ready, says what it lacks, answers all the same, and is ready when it has
// the right.
func (w *world) missingRight(daemons *kubelab.Daemons, manifest []byte) {
	t := w.t
	const path = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/dnsguard"
	w.must(w.Do(w.soon(), http.MethodPatch, path, string(types.JSONPatchType), []byte(`[{"op": "remove", "path": "/rules/1"}]`), nil))
	old := daemons.Guards()[0]
	pods, err := w.Core.Pods("kube-system").List(w.soon(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=dnsguard", FieldSelector: "spec.nodeName=" + w.nodes[0].Name,
	})
	w.must(err)
	w.must(w.Core.Pods("kube-system").Delete(w.soon(), pods.Items[0].Name, metav1.DeleteOptions{}))
	var reason string
	w.await("a pod that says which right it lacks", func(ctx context.Context) error {
		g := daemons.Guards()[0]
		if g == old || g.Node != old.Node {
			return errors.New("the old one")
		}
		if reason, err = g.Page(ctx, "/readyz"); err != nil || !strings.Contains(reason, `cannot list resource "endpointslices"`) {
			return fmt.Errorf("/readyz says %q, %w", reason, err)
		}
		return nil
	})
	if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Errorf("with a right missing: %v", err)
	}
	_, err = w.Apply(w.soon(), manifest, false)
	w.must(err)
	w.must(daemons.Guards()[0].AwaitReady(w.soon()))
	t.Logf("without the right to list EndpointSlices: pods are answered, /readyz says %q; ready when it is back", strings.TrimSpace(reason))
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
