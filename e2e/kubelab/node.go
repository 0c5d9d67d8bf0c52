package kubelab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Node is a node's network namespace, its object, and kubelet's part.
type Node struct {
	*lab.Namespace
	Name     string
	IP4, IP6 netip.Addr
	Proxy    *Proxy // nil until StartProxy

	cluster *Cluster
	number  int
	pods    []*Pod
	made    int // pods ever made: addresses are not used again
	guards  []*Guard
}

// firstNode is the number of the first node: the wire and the control plane have
// those before it.
const firstNode = 11

// AddNode adds a node without kube-proxy and pods. Close it.
func (c *Cluster) AddNode(ctx context.Context, name string) (n *Node, err error) {
	n = &Node{cluster: c, number: firstNode + c.nodes, Name: name}
	if n.number > 250 {
		return nil, fmt.Errorf("add node %s: the node network is full", name)
	}
	c.nodes++
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("add node %s: %w", name, err), n.Close(ctx))
			n = nil
		}
	}()
	n.IP4 = netip.AddrFrom4([4]byte{172, 30, 0, byte(n.number)})
	n.IP6 = netip.MustParseAddr(fmt.Sprintf("fd00:172:30::%x", n.number))
	if n.Namespace, err = lab.NewNamespace(name); err != nil {
		return n, err
	}
	if err = router(n.Namespace); err != nil {
		return n, err
	}
	if err = plug(c.wire, n.link(), wireAddr, n.Namespace, []netip.Addr{n.IP4, n.IP6}, n.podNets()...); err != nil {
		return n, err
	}
	// What a node does not know of its own pods is not sent back to it.
	if err = n.void("add"); err != nil {
		return n, err
	}
	_, err = c.Core.Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
	}, metav1.CreateOptions{})
	if err != nil {
		return n, err
	}
	status := fmt.Sprintf(`{"status": {"addresses": [{"type": "InternalIP", "address": %q}, {"type": "InternalIP", "address": %q}, {"type": "Hostname", "address": %q}],
		"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}}`, n.IP4, n.IP6, name)
	_, err = c.Core.Nodes().PatchStatus(ctx, name, []byte(status))
	return n, err
}

// link is the wire's end of the link to the node.
func (n *Node) link() string { return fmt.Sprintf("node%d", n.number) }

// podNets are the networks of the node's pods.
func (n *Node) podNets() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", n.number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%x::/64", n.number)),
	}
}

// Close ends everything on the node and deletes its objects.
func (n *Node) Close(ctx context.Context) error {
	var errs []error
	for _, p := range n.pods {
		errs = append(errs, p.Delete(ctx, 0), p.Close())
	}
	if n.Namespace != nil {
		errs = append(errs, n.Namespace.Close())
	}
	if err := n.cluster.Core.Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{}); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, n.void("del"))
	return errors.Join(errs...)
}

// void adds or deletes the rules with which the wire lets vanish what a node
// sends to its own pods: it does not know them, then.
func (n *Node) void(verb string) error {
	var errs []error
	for _, net := range n.podNets() {
		family := "-4"
		if net.Addr().Is6() {
			family = "-6"
		}
		errs = append(errs, ipFamily(n.cluster.wire, family, fmt.Sprintf("rule %s iif %s to %v blackhole", verb, n.link(), net)))
	}
	return errors.Join(errs...)
}

// Logs returns the last lines of what the node's programs printed.
func (n *Node) Logs(lines int) string {
	var all []*Program
	if n.Proxy != nil {
		all = append(all, n.Proxy.Program)
	}
	for _, p := range n.pods {
		all = append(all, p.program)
	}
	for _, g := range n.guards {
		all = append(all, g.Program)
	}
	return logs(lines, all...)
}
