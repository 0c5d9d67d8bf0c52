package kubelab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Pod is a pod's network namespace and object.
type Pod struct {
	*lab.Namespace
	Node      *Node
	KubeSpace string // its Kubernetes namespace
	Name      string
	IP4, IP6  netip.Addr

	veth    string
	program *Program // of its container, if it has one

	mu      sync.Mutex
	deleted bool
}

// grace is terminationGracePeriodSeconds, the default.
const grace = 30

// AddPod adds a pod whose containers run at once: status and readiness are
// reported to the API server.
func (n *Node) AddPod(ctx context.Context, namespace, name string, labels map[string]string) (*Pod, error) {
	p, err := n.newPod(ctx, namespace, name, labels)
	if err != nil {
		return nil, err
	}
	return p, p.Report(ctx, true)
}

// newPod adds a pod that is not ready.
func (n *Node) newPod(ctx context.Context, namespace, name string, labels map[string]string) (*Pod, error) {
	n.made++
	if n.made > 250 {
		return nil, fmt.Errorf("add pod %s: the pod network of %s is full", name, n.Name)
	}
	number := byte(n.made + 1)
	p := &Pod{Node: n, KubeSpace: namespace, Name: name, veth: fmt.Sprintf("veth%d", number)}
	p.IP4 = netip.AddrFrom4([4]byte{10, 244, byte(n.number), number})
	p.IP6 = netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%x::%x", n.number, number))
	seconds := int64(grace)
	_, err := n.cluster.Core.Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: labels},
		Spec: corev1.PodSpec{
			NodeName: n.Name, DNSPolicy: corev1.DNSClusterFirst, TerminationGracePeriodSeconds: &seconds,
			Containers: []corev1.Container{{Name: "main", Image: "example.com/none"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("add pod %s: %w", name, err)
	}
	if p.Namespace, err = lab.NewNamespace(name); err != nil {
		return nil, errors.Join(err, p.Delete(ctx, 0))
	}
	n.pods = append(n.pods, p)
	gateway := []netip.Addr{
		netip.AddrFrom4([4]byte{10, 244, byte(n.number), 1}),
		netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%x::1", n.number)),
	}
	return p, plug(n.Namespace, p.veth, gateway, p.Namespace, []netip.Addr{p.IP4, p.IP6})
}

// Report tells the API server in kubelet's place that the pod runs, and whether
// it is ready.
func (p *Pod) Report(ctx context.Context, ready bool) error {
	state := "False"
	if ready {
		state = "True"
	}
	status := fmt.Sprintf(`{"status": {"phase": "Running", "hostIP": %q, "podIP": %q, "podIPs": [{"ip": %q}, {"ip": %q}],
		"conditions": [{"type": "Ready", "status": %q}, {"type": "ContainersReady", "status": %q}, {"type": "Initialized", "status": "True"}, {"type": "PodScheduled", "status": "True"}]}}`,
		p.Node.IP4, p.IP4, p.IP4, p.IP6, state, state)
	_, err := p.Node.cluster.Core.Pods(p.KubeSpace).Patch(ctx, p.Name, types.StrategicMergePatchType, []byte(status), metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("report pod %s: %w", p.Name, err)
	}
	return nil
}

// Delete deletes the pod's object. With a grace period the API server keeps it,
// as terminating, until it is deleted without one, which is kubelet's last step.
// What runs in the pod runs on.
func (p *Pod) Delete(ctx context.Context, seconds int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deleted {
		return nil
	}
	err := p.Node.cluster.Core.Pods(p.KubeSpace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &seconds})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete pod %s: %w", p.Name, err)
	}
	p.deleted = seconds == 0
	return nil
}

// Unplug removes the pod's link: nothing comes back from its address any more.
func (p *Pod) Unplug() error { return ip(p.Node.Namespace, "link del "+p.veth) }

// Die is the abrupt end of a pod, as its node's is: silent from one moment to
// the next. The API server is told nothing.
func (p *Pod) Die() error {
	err := p.Unplug() // before the socket goes: no ICMP error tells of that
	if p.program != nil {
		p.program.Kill()
	}
	return err
}

// Terminate deletes the pod with its grace period and plays kubelet's part: the
// program is asked to end, the pod reported unready when it has, and its object
// deleted for good.
func (p *Pod) Terminate(ctx context.Context) error {
	if err := p.Delete(ctx, grace); err != nil {
		return err
	}
	if p.program != nil {
		if err := p.program.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		select {
		case <-p.program.Done():
		case <-ctx.Done():
			return fmt.Errorf("%s in pod %s does not end: %w", p.program.Name, p.Name, ctx.Err())
		}
	}
	if err := p.Report(ctx, false); err != nil {
		return err
	}
	if err := p.Unplug(); err != nil {
		return err
	}
	return p.Delete(ctx, 0)
}

// Running tells whether the pod's program has not ended.
func (p *Pod) Running() bool { return p.program != nil && p.program.Running() == nil }
