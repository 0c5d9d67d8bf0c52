package kubelab

import (
	"context"
	"fmt"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Proxy is the node's kube-proxy.
type Proxy struct {
	*Program
	Mode string // iptables or nftables
}

const proxyHealth = "http://127.0.0.1:10256/healthz"

// StartProxy starts kube-proxy on the node, and waits until it says that its
// rules are there.
func (n *Node) StartProxy(ctx context.Context, mode string) error {
	config, err := n.cluster.Kubeconfig(false, "system:kube-proxy")
	if err != nil {
		return err
	}
	n.Proxy = &Proxy{Mode: mode}
	n.Proxy.Program, err = start(n.Namespace, "kube-proxy ("+mode+")", n.cluster.components.path("kube-proxy"), []string{
		"--kubeconfig=/run/kubeconfig", "--hostname-override=" + n.Name, "--proxy-mode=" + mode,
		"--cluster-cidr=" + podCIDRs, "--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
		// nf_conntrack_max is read-only in a namespace.
		"--conntrack-max-per-core=0", "--conntrack-min=0",
	}, map[string][]byte{"kubeconfig": config})
	if err != nil {
		return err
	}
	return Await(ctx, "kube-proxy is healthy on "+n.Name, func(ctx context.Context) error {
		if err := n.Proxy.Running(); err != nil {
			return err
		}
		return healthy(ctx, n.Namespace, proxyHealth)
	})
}

// awaitAPI waits until the API server is reached by its ClusterIP. An attempt
// that comes too early leaves a flow without translation: every one is made from
// a new port.
func awaitAPI(ctx context.Context, ns *lab.Namespace) error {
	return Await(ctx, fmt.Sprintf("the API's ClusterIP from %s", ns), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		conn, err := ns.Dial(ctx, "tcp", "10.96.0.1:443")
		if err != nil {
			return err
		}
		return conn.Close()
	})
}
