package kubelab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Daemons play kube-scheduler's and kubelet's part for the pods that the DaemonSet
// controller makes for dnsguard: each is bound to its node, its containers are run as
// its object says (command, environment, volumes, identity, capabilities), those that
// initialize first; it is probed with its own probe, started again when it ends, and
// asked to end when it is deleted.
type Daemons struct {
	cluster *Cluster
	nodes   map[string]*Node
	stop    context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	pods    map[types.UID]*daemonPod
	errs    []error
	crashes []string // what containers printed that ended by themselves, not yet taken
}

// daemonPod is one of them.
type daemonPod struct {
	*Guard
	pod   *corev1.Pod
	leave chan struct{} // closed when the pod is deleted
	ended chan struct{}
	ready bool
}

const (
	daemonSpace    = "kube-system"
	daemonSelector = "app.kubernetes.io/name=dnsguard"
	accountDir     = "/var/run/secrets/kubernetes.io/serviceaccount"
	// syncEvery is how often the API server is asked for pods.
	syncEvery = 100 * time.Millisecond
	// restartAfter is how long after its end a container is started again: kubelet's
	// ten seconds, shortened.
	restartAfter = 500 * time.Millisecond
)

// PlayDaemons begins. Close it.
func (c *Cluster) PlayDaemons(nodes ...*Node) *Daemons {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Daemons{cluster: c, nodes: map[string]*Node{}, stop: cancel, pods: map[types.UID]*daemonPod{}}
	for _, n := range nodes {
		d.nodes[n.Name] = n
	}
	d.running.Go(func() {
		for ctx.Err() == nil {
			d.fail(ctx, d.sync(ctx))
			select {
			case <-time.After(syncEvery):
			case <-ctx.Done():
			}
		}
	})
	return d
}

// fail keeps an error, unless it comes from the end.
func (d *Daemons) fail(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.errs = append(d.errs, err)
}

// Close does as End, and returns what went wrong since the beginning. A container
// that ended by itself is wrong, unless TakeCrashes was told of it.
func (d *Daemons) Close(ctx context.Context) error {
	err := d.End(ctx)
	d.stop()
	d.running.Wait()
	for _, text := range d.TakeCrashes() {
		err = errors.Join(err, fmt.Errorf("a container ended by itself:\n%s", text))
	}
	return errors.Join(append(d.errs, err)...)
}

// TakeCrashes returns what containers printed that have ended by themselves since the
// last call.
func (d *Daemons) TakeCrashes() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	taken := d.crashes
	d.crashes = nil
	return taken
}

// End deletes the pods and waits for their containers. The DaemonSet must have been
// deleted.
func (d *Daemons) End(ctx context.Context) error {
	list, err := d.list(ctx)
	for _, p := range list {
		err = errors.Join(err, d.cluster.Core.Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{}))
	}
	return errors.Join(err, Await(ctx, "the end of dnsguard's pods", func(ctx context.Context) error {
		if left, err := d.list(ctx); err != nil || len(left) > 0 {
			return fmt.Errorf("%d left, %w", len(left), err)
		}
		return nil
	}))
}

func (d *Daemons) list(ctx context.Context) ([]corev1.Pod, error) {
	list, err := d.cluster.Core.Pods(daemonSpace).List(ctx, metav1.ListOptions{LabelSelector: daemonSelector})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// sync looks at the pods once.
func (d *Daemons) sync(ctx context.Context) error {
	list, err := d.list(context.WithoutCancel(ctx)) // client-go logs a request cut short
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, pod := range list {
		p := d.pods[pod.UID]
		if p == nil {
			p = &daemonPod{pod: &pod, leave: make(chan struct{}), ended: make(chan struct{})}
			d.pods[pod.UID] = p
			d.running.Go(func() {
				defer close(p.ended)
				d.fail(ctx, d.run(ctx, p))
			})
		}
		if pod.DeletionTimestamp != nil {
			select {
			case <-p.leave:
			default:
				close(p.leave)
			}
		}
	}
	return nil
}

// run is a pod's life.
func (d *Daemons) run(ctx context.Context, p *daemonPod) error {
	node := d.nodes[affinityNode(p.pod)]
	if node == nil {
		return fmt.Errorf("pod %s is for no node of the laboratory", p.pod.Name)
	}
	err := d.cluster.Core.Pods(daemonSpace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: p.pod.Name, Namespace: daemonSpace},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node.Name},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	p.pod.Spec.NodeName = node.Name
	if err := d.initialize(ctx, node, p.pod); err != nil {
		return err
	}
	for {
		g, err := d.start(ctx, node, p.pod, p.pod.Spec.Containers[0])
		if err != nil {
			return err
		}
		d.mu.Lock()
		p.Guard = g
		node.guards = append(node.guards, g)
		d.mu.Unlock()
		if err := d.report(ctx, p, false); err != nil {
			return err
		}
		crashed, err := d.tend(ctx, p)
		if err != nil || ctx.Err() != nil {
			return err
		}
		if !crashed {
			break
		}
		d.mu.Lock()
		d.crashes = append(d.crashes, g.Log.Tail(20))
		d.mu.Unlock()
		select {
		case <-p.leave:
			return d.gone(ctx, p)
		case <-time.After(restartAfter):
		case <-ctx.Done():
			return nil
		}
	}
	grace, cancel := context.WithTimeout(ctx, time.Duration(*p.pod.Spec.TerminationGracePeriodSeconds)*time.Second)
	defer cancel()
	if p.Running() != nil { // it ended by itself at the same moment
		return d.gone(ctx, p)
	}
	if err := p.Stop(grace); err != nil {
		return fmt.Errorf("end of pod %s: %w", p.pod.Name, err)
	}
	return d.gone(ctx, p)
}

// initialize runs the containers that come before the pod's own, one after the other.
func (d *Daemons) initialize(ctx context.Context, node *Node, pod *corev1.Pod) error {
	for _, c := range pod.Spec.InitContainers {
		g, err := d.start(ctx, node, pod, c)
		if err != nil {
			return err
		}
		select {
		case <-g.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := g.Err(); err != nil {
			return fmt.Errorf("container %s of pod %s: %w\n%s", c.Name, pod.Name, err, g.Log.Tail(20))
		}
	}
	return nil
}

// tend probes the pod's container until it is to leave, or ends by itself.
func (d *Daemons) tend(ctx context.Context, p *daemonPod) (crashed bool, err error) {
	for {
		select {
		case <-p.leave:
			return false, nil
		case <-p.Done():
			return true, d.report(ctx, p, false)
		case <-time.After(syncEvery):
			if err := d.report(ctx, p, p.probe(ctx, p.pod.Spec.Containers[0].ReadinessProbe) == nil); err != nil {
				return false, err
			}
		case <-ctx.Done():
			return false, nil
		}
	}
}

// gone is kubelet's last step.
func (d *Daemons) gone(ctx context.Context, p *daemonPod) error {
	now := int64(0)
	return d.cluster.Core.Pods(daemonSpace).Delete(ctx, p.pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
}

// affinityNode is the node for which the DaemonSet controller made the pod.
func affinityNode(pod *corev1.Pod) string {
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, field := range term.MatchFields {
				if field.Key == "metadata.name" {
					return field.Values[0]
				}
			}
		}
	}
	return ""
}

// known are the capabilities that manifests name.
func known(name corev1.Capability) (uintptr, bool) {
	number, ok := map[corev1.Capability]uintptr{
		"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "NET_RAW": unix.CAP_NET_RAW,
	}[name]
	return number, ok
}

// container is what the pod's object says of a container.
func (d *Daemons) container(ctx context.Context, pod *corev1.Pod, spec *corev1.Container) (*container, error) {
	c := &container{
		Binary: d.cluster.components.DNSGuard, Argv: append(slices.Clone(spec.Command), spec.Args...),
		Env: []string{"PATH=/usr/bin", "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443"}, // the image's
	}
	if strings.HasSuffix(spec.Image, "-iptables") {
		c.IPTables = "legacy" // Containerfile's default
		c.Env[0] = "PATH=/usr/sbin:/usr/bin"
	}
	// A container learns of the Services that its start finds.
	dns, err := d.cluster.Core.Services(daemonSpace).Get(ctx, "kube-dns", metav1.GetOptions{})
	if err == nil {
		c.Env = append(c.Env, "KUBE_DNS_SERVICE_HOST="+dns.Spec.ClusterIP, "KUBE_DNS_SERVICE_PORT=53")
	} else if !apierrors.IsNotFound(err) {
		return nil, err
	}
	for _, e := range spec.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil && from.FieldRef != nil && from.FieldRef.FieldPath == "spec.nodeName" {
			value = pod.Spec.NodeName
		} else if from != nil && from.ResourceFieldRef != nil && from.ResourceFieldRef.Resource == "requests.memory" {
			value = strconv.FormatInt(spec.Resources.Requests.Memory().Value(), 10)
		} else if from != nil {
			return nil, fmt.Errorf("pod %s: variable %s is from what is not known here", pod.Name, e.Name)
		}
		c.Env = append(c.Env, e.Name+"="+value)
	}
	for _, m := range spec.VolumeMounts {
		i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		switch v := pod.Spec.Volumes[i]; {
		case v.ConfigMap != nil && m.MountPath == configVolume, v.EmptyDir != nil:
			c.Volumes = append(c.Volumes, m.MountPath)
		case v.HostPath != nil && *v.HostPath.Type == corev1.HostPathFileOrCreate:
			c.HostFiles = append(c.HostFiles, m.MountPath)
		default:
			return nil, fmt.Errorf("pod %s: volume %s is not known here", pod.Name, v.Name)
		}
	}
	if spec.SecurityContext.Capabilities != nil {
		for _, name := range spec.SecurityContext.Capabilities.Add {
			number, ok := known(name)
			if !ok {
				return nil, fmt.Errorf("pod %s: capability %s", pod.Name, name)
			}
			c.Capabilities = append(c.Capabilities, number)
		}
	}
	return c, nil
}

// start runs a container of the pod.
func (d *Daemons) start(ctx context.Context, node *Node, pod *corev1.Pod, spec corev1.Container) (*Guard, error) {
	config, err := d.config(ctx)
	if err != nil {
		return nil, err
	}
	token, err := d.cluster.Core.ServiceAccounts(daemonSpace).CreateToken(ctx, pod.Spec.ServiceAccountName, &authv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token for pod %s: %w", pod.Name, err)
	}
	c, err := d.container(ctx, pod, &spec)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	g := &Guard{Node: node, Program: &Program{Name: spec.Name + " " + pod.Name, Log: new(Log)}}
	root := strings.TrimPrefix(containerRoot, "/run/")
	g.Process, err = node.Start(lab.Command{
		Path: self, Env: []string{containerEnv + "=" + string(text)}, Stdout: g.Log, Stderr: g.Log,
		Files: map[string][]byte{
			strings.TrimPrefix(containerConfig, "/run/"): config,
			root + accountDir + "/token":                 []byte(token.Status.Token),
			root + accountDir + "/ca.crt":                d.cluster.authority.pem,
			root + accountDir + "/namespace":             []byte(daemonSpace),
			root + "/etc/resolv.conf":                    fmt.Appendf(nil, "nameserver %v\n", worldDNS.Addr()), // the node's
		},
	})
	return g, err
}

// config is the ConfigMap's file.
func (d *Daemons) config(ctx context.Context) ([]byte, error) {
	m, err := d.cluster.Core.ConfigMaps(daemonSpace).Get(ctx, "dnsguard", metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return []byte(m.Data["config.yaml"]), nil
}

// SyncConfig writes what the ConfigMap says now into every container, as kubelet
// does within a minute.
func (d *Daemons) SyncConfig(ctx context.Context) error {
	config, err := d.config(ctx)
	if err != nil {
		return err
	}
	for _, g := range d.Guards() {
		dir := fmt.Sprintf("/proc/%d/root%s/", g.Pid(), configVolume)
		err := Await(ctx, "the volume of "+g.Name, func(context.Context) error {
			if g.Running() != nil { // the next one reads it when it starts
				return nil
			}
			if _, err := os.Stat(dir + "config.yaml"); err != nil { // not confined yet
				return err
			}
			if err := os.WriteFile(dir+"new", config, 0o644); err != nil {
				return err
			}
			return os.Rename(dir+"new", dir+"config.yaml")
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Guards returns the running ones, by node and in the order of their start.
func (d *Daemons) Guards() []*Guard {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*Guard
	for _, name := range slices.Sorted(maps.Keys(d.nodes)) {
		for _, g := range d.nodes[name].guards {
			if g.Running() == nil {
				all = append(all, g)
			}
		}
	}
	return all
}

// probe runs a probe's command against the container; without one it is ready.
func (g *Guard) probe(ctx context.Context, p *corev1.Probe) error {
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(p.TimeoutSeconds)*time.Second)
	defer cancel()
	args := slices.Clone(p.Exec.Command[1:])
	for i, a := range args { // the container's /run
		args[i] = strings.Replace(a, "/run/", g.ScratchPath(""), 1)
	}
	return exec.CommandContext(ctx, g.Node.cluster.components.DNSGuard, args...).Run()
}

// report tells the API server whether the pod is ready, when that has changed.
func (d *Daemons) report(ctx context.Context, p *daemonPod, ready bool) error {
	if ready == p.ready && ready {
		return nil
	}
	if !ready && !p.ready && p.pod.Status.Phase == corev1.PodRunning {
		return nil
	}
	p.ready, p.pod.Status.Phase = ready, corev1.PodRunning
	state := "False"
	if ready {
		state = "True"
	}
	status := fmt.Sprintf(`{"status": {"phase": "Running", "hostIP": %[1]q, "podIP": %[1]q, "podIPs": [{"ip": %[1]q}, {"ip": %[2]q}],
		"conditions": [{"type": "Ready", "status": %[3]q, "lastTransitionTime": %[4]q}, {"type": "ContainersReady", "status": %[3]q, "lastTransitionTime": %[4]q}]}}`,
		p.Node.IP4, p.Node.IP6, state, time.Now().UTC().Format(time.RFC3339))
	_, err := d.cluster.Core.Pods(daemonSpace).Patch(ctx, p.pod.Name, types.StrategicMergePatchType, []byte(status), metav1.PatchOptions{}, "status")
	return err
}
