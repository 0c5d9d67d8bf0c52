package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
)

// setTargetPort changes where kube-dns's ports lead to.
func setTargetPort(ctx context.Context, c *kubelab.Cluster, port int) error {
	patch := fmt.Sprintf(`[{"op": "replace", "path": "/spec/ports/0/targetPort", "value": %[1]d}, {"op": "replace", "path": "/spec/ports/1/targetPort", "value": %[1]d}]`, port)
	_, err := c.Core.Services("kube-system").Patch(ctx, "kube-dns", types.JSONPatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// TestTargetPort: CoreDNS listens on 5353. Pods are answered, and the guard tells
// living flows from dead ones by that port.
func TestTargetPort(t *testing.T) {
	const port = 5353
	c := cluster(t)
	if err := setTargetPort(t.Context(), c, port); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := setTargetPort(context.Background(), c, 53); err != nil {
			t.Error(err)
		}
	})
	w := newWorldAt(t, port, "nftables")
	g := w.guard(w.nodes[0], kubelab.GuardOnly()...)
	r := w.play(incident{server: kubelab.DNS4, give: 15 * time.Second})
	t.Logf("CoreDNS on port %d, force-deleted, with the guard: %v", port, r)
	if r.first < 0 {
		t.Error("not healed")
	}
	w.leave(g)
	w.restore()
	g = w.guard(w.nodes[0])
	defer w.leave(g)
	for _, server := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6} {
		for _, network := range []string{"udp", "tcp"} {
			if _, err := w.ask(w.client.Namespace, network, server, apiName, 1); err != nil {
				t.Errorf("%v over %s: %v", server, network, err)
			}
		}
	}
}
