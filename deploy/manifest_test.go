package deploy

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/dnsguard/dnsguard/internal/config"
)

// TestDaemonSet: the manifest that applies as it is.
func TestDaemonSet(t *testing.T) {
	all := decodeFile(t, "daemonset.yaml")
	check(t, all)

	// kubectl apply makes them in their order.
	data, err := os.ReadFile("daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if i, j := bytes.Index(data, []byte("kind: ServiceAccount")), bytes.Index(data, []byte("kind: DaemonSet")); i > j {
		t.Error("the DaemonSet comes before what it needs")
	}
	// kustomize reads no file outside of its directory.
	made(t, filepath.Join("base", "daemonset.yaml"), string(data))
}

// made keeps a file equal to what it is made of.
func made(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // a manifest
			t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(file); err != nil || string(data) != text {
		t.Errorf("%s is not what it is made of any more (%v); go test . -update", file, err)
	}
}

// check holds for every rendering.
func check(t *testing.T, all objects) {
	t.Helper()
	ds := the[*appsv1.DaemonSet](t, all)
	spec := ds.Spec.Template.Spec
	if len(spec.Containers) != 1 {
		t.Fatalf("%d containers", len(spec.Containers))
	}
	c := spec.Containers[0]
	cfg := checkConfig(t, all, ds, c)
	checkIdentity(t, all, ds)
	checkNode(t, cfg, ds, c)
	checkRights(t, cfg, spec, c)
	checkProbes(t, cfg, spec, c)
	checkUpdate(t, cfg, ds)
	checkMetrics(t, cfg, all, ds)
	checkMemory(t, c)
	checkRequests(t, cfg, all)
}

// checkConfig puts the ConfigMap to dnsguard check, as the container will read it,
// and returns it as dnsguard understands it.
func checkConfig(t *testing.T, all objects, ds *appsv1.DaemonSet, c corev1.Container) *config.Config {
	t.Helper()
	if !slices.Equal(c.Command, []string{"dnsguard"}) || len(c.Args) < 2 || c.Args[0] != "run" {
		t.Fatalf("runs %q %q", c.Command, c.Args)
	}
	file, ok := strings.CutPrefix(c.Args[1], "--config=")
	if !ok {
		t.Fatalf("the second argument is no --config: %q", c.Args)
	}
	source := volumeAt(t, ds.Spec.Template.Spec, c, path.Dir(file)).ConfigMap
	if source == nil {
		t.Fatalf("%s is on no ConfigMap", file)
	}
	cm, _ := all["ConfigMap "+ds.Namespace+"/"+source.Name].(*corev1.ConfigMap)
	if cm == nil {
		t.Fatalf("there is no ConfigMap %s", source.Name)
	}
	if len(cm.Data) != 1 || cm.Data[path.Base(file)] == "" {
		t.Fatalf("the ConfigMap has no %s, or something else: %v", path.Base(file), cm.Data)
	}
	text := cm.Data[path.Base(file)]
	local := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(local, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, flags := range [][]string{nil, expand(c, c.Args[2:])} {
		if out, err := dnsguard(t, append([]string{"check", "--config=" + local}, flags...)...); err != nil {
			t.Errorf("dnsguard check %q: %v\n%s\n%s", flags, err, out, text)
		}
	}
	cfg, err := config.Parse(file, []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	// Every argument is one that the command has.
	if out, err := dnsguard(t, append(expand(c, c.Args), "--help")...); err != nil {
		t.Errorf("dnsguard %q: %v\n%s", c.Args, err, out)
	}
	return cfg
}

// expand does what kubelet does to arguments.
func expand(c corev1.Container, args []string) []string {
	var out []string
	for _, a := range args {
		for _, e := range c.Env {
			value := e.Value
			if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "status.podIP" {
				value = "127.0.0.1"
			}
			a = strings.ReplaceAll(a, "$("+e.Name+")", value)
		}
		out = append(out, a)
	}
	return out
}

// volumeAt returns the volume that is mounted at a directory.
func volumeAt(t *testing.T, spec corev1.PodSpec, c corev1.Container, dir string) corev1.VolumeSource {
	t.Helper()
	for _, m := range c.VolumeMounts {
		if m.MountPath != dir {
			continue
		}
		if m.SubPath != "" {
			t.Errorf("%s is mounted by subPath: kubelet would never change it", dir)
		}
		for _, v := range spec.Volumes {
			if v.Name == m.Name {
				return v.VolumeSource
			}
		}
	}
	t.Fatalf("nothing is mounted at %s", dir)
	return corev1.VolumeSource{}
}

// checkIdentity follows the references between the objects.
func checkIdentity(t *testing.T, all objects, ds *appsv1.DaemonSet) {
	t.Helper()
	sa := the[*corev1.ServiceAccount](t, all)
	if ds.Spec.Template.Spec.ServiceAccountName != sa.Name || sa.Namespace != ds.Namespace {
		t.Errorf("the pods' ServiceAccount is %s, there is %s/%s", ds.Spec.Template.Spec.ServiceAccountName, sa.Namespace, sa.Name)
	}
	want := rbacv1.Subject{Kind: "ServiceAccount", Name: sa.Name, Namespace: sa.Namespace}
	for _, b := range of[*rbacv1.RoleBinding](all) {
		if !slices.Equal(b.Subjects, []rbacv1.Subject{want}) || b.RoleRef.APIGroup != rbacv1.GroupName || all[b.RoleRef.Kind+" "+b.Namespace+"/"+b.RoleRef.Name] == nil {
			t.Errorf("RoleBinding %s/%s: %+v, %+v", b.Namespace, b.Name, b.RoleRef, b.Subjects)
		}
	}
	for _, b := range of[*rbacv1.ClusterRoleBinding](all) {
		if !slices.Equal(b.Subjects, []rbacv1.Subject{want}) || b.RoleRef.APIGroup != rbacv1.GroupName || all[b.RoleRef.Kind+" /"+b.RoleRef.Name] == nil {
			t.Errorf("ClusterRoleBinding %s: %+v, %+v", b.Name, b.RoleRef, b.Subjects)
		}
	}
	for key, value := range ds.Spec.Selector.MatchLabels {
		if ds.Spec.Template.Labels[key] != value {
			t.Errorf("the selector wants %s=%s, the pods have %q", key, value, ds.Spec.Template.Labels[key])
		}
	}
	if len(ds.Spec.Selector.MatchLabels) != 1 {
		t.Errorf("the selector cannot be changed later: %v", ds.Spec.Selector.MatchLabels)
	}
}

// checkNode: where and how the pod runs on its node.
func checkNode(t *testing.T, cfg *config.Config, ds *appsv1.DaemonSet, c corev1.Container) {
	t.Helper()
	spec := ds.Spec.Template.Spec
	if cfg.Kubernetes.Source == config.SourceAPI {
		if dns := cfg.Kubernetes.DNSService; dns.Namespace != ds.Namespace || spec.EnableServiceLinks == nil || !*spec.EnableServiceLinks {
			t.Errorf("kubelet does not tell pods of %s the address of %v", ds.Namespace, dns)
		}
	}
	if spec.DNSPolicy != corev1.DNSDefault {
		t.Errorf("dnsPolicy %s would lead to ourselves", spec.DNSPolicy)
	}
	if spec.PriorityClassName != "system-node-critical" {
		t.Errorf("priorityClassName %q", spec.PriorityClassName)
	}
	if !slices.ContainsFunc(spec.Tolerations, func(t corev1.Toleration) bool {
		return t.Operator == corev1.TolerationOpExists && t.Key == "" && t.Effect == ""
	}) {
		t.Errorf("not on every node: %+v", spec.Tolerations)
	}
	if spec.NodeSelector["kubernetes.io/os"] != "linux" {
		t.Errorf("nodeSelector %v", spec.NodeSelector)
	}
	off := len(spec.InitContainers) > 0 // remove cleans up on all of them
	for label, want := range map[string]bool{
		"": true, "dnsguard.io/off=": off, "dnsguard.io/off=true": off,
		"type=virtual-kubelet": false, "eks.amazonaws.com/compute-type=fargate": false, "eks.amazonaws.com/compute-type=ec2": true,
	} {
		if got := runsOn(t, spec.Affinity, label); got != want {
			t.Errorf("on a node with the label %q: %v", label, got)
		}
	}
	if g := spec.TerminationGracePeriodSeconds; g == nil || *g < 10 {
		t.Errorf("terminationGracePeriodSeconds %v: a drain takes up to 5 s", g)
	}
	if (cfg.Intercept.Mode != config.InterceptNone || cfg.Guard.Enabled) && !spec.HostNetwork {
		t.Error("the node's rules and flows are out of reach on the pod network")
	}
	if spec.HostNetwork && len(c.Ports) > 0 {
		t.Errorf("ports become host ports, and the pod of an update waits for them: %+v", c.Ports)
	}
	name := ""
	for _, e := range c.Env {
		if e.Name == "NODE_NAME" && e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
			name = e.ValueFrom.FieldRef.FieldPath
		}
	}
	if name != "spec.nodeName" {
		t.Errorf("NODE_NAME comes from %q", name)
	}
}

// runsOn reports whether a pod may run on a node with a label (key=value).
func runsOn(t *testing.T, affinity *corev1.Affinity, label string) bool {
	t.Helper()
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	node := labels.Set{}
	if key, value, ok := strings.Cut(label, "="); ok {
		node[key] = value
	}
	operators := map[corev1.NodeSelectorOperator]selection.Operator{
		corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
		corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
	}
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		all := labels.NewSelector()
		for _, e := range term.MatchExpressions {
			r, err := labels.NewRequirement(e.Key, operators[e.Operator], e.Values)
			if err != nil {
				t.Fatal(err)
			}
			all = all.Add(*r)
		}
		if all.Matches(node) {
			return true
		}
	}
	return false
}

// checkRights: no right but those that the configuration needs.
func checkRights(t *testing.T, cfg *config.Config, spec corev1.PodSpec, c corev1.Container) {
	t.Helper()
	if spec.HostPID || spec.HostIPC || spec.SecurityContext != nil {
		t.Errorf("hostPID %v, hostIPC %v, %+v", spec.HostPID, spec.HostIPC, spec.SecurityContext)
	}
	var want []corev1.Capability
	if cfg.Intercept.Mode != config.InterceptNone || cfg.Guard.Enabled {
		want = append(want, "NET_ADMIN")
	}
	low := cfg.Intercept.Mode != config.InterceptNone
	for _, a := range cfg.Listen {
		low = low || a.Port() < 1024
	}
	if low {
		want = append(want, "NET_BIND_SERVICE")
	}
	iptables := cfg.Intercept.Backend == config.BackendIPTables
	if iptables {
		want = append(want, "NET_RAW")
	}
	confined(t, c, want)
	for _, init := range spec.InitContainers {
		confined(t, init, []corev1.Capability{"NET_ADMIN"})
		if out, err := dnsguard(t, append(slices.Clone(init.Args), "--help")...); err != nil || !slices.Equal(init.Command, []string{"dnsguard"}) {
			t.Errorf("%q %q: %v\n%s", init.Command, init.Args, err, out)
		}
		if init.Image != c.Image {
			t.Errorf("images %s and %s", init.Image, c.Image)
		}
	}
	for _, v := range spec.Volumes {
		if h := v.HostPath; h != nil && (!iptables || h.Path != "/run/xtables.lock") {
			t.Errorf("mounts the node's %s", h.Path)
		}
	}
}

func confined(t *testing.T, c corev1.Container, capabilities []corev1.Capability) {
	t.Helper()
	s := c.SecurityContext
	if s == nil || s.Capabilities == nil {
		t.Fatalf("container %s: %+v", c.Name, s)
	}
	if s.Privileged != nil && *s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
		s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault ||
		s.RunAsUser == nil || *s.RunAsUser != 0 {
		t.Errorf("container %s: %+v", c.Name, s)
	}
	if !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || !slices.Equal(s.Capabilities.Add, capabilities) {
		t.Errorf("container %s: capabilities %+v, want %v", c.Name, s.Capabilities, capabilities)
	}
}

// checkProbes: they ask over the control socket, and a mistake in the configuration
// does not fail them.
func checkProbes(t *testing.T, cfg *config.Config, spec corev1.PodSpec, c corev1.Container) {
	t.Helper()
	if source := volumeAt(t, spec, c, path.Dir(cfg.Control)); source.EmptyDir == nil {
		t.Errorf("%s is not on an emptyDir: %+v", cfg.Control, source)
	}
	if c.LivenessProbe == nil {
		t.Fatal("no liveness probe")
	}
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
		if p == nil { // remove has none
			continue
		}
		if p.Exec == nil || len(p.Exec.Command) < 2 || p.Exec.Command[0] != "dnsguard" || p.Exec.Command[1] != "health" {
			t.Fatalf("probe %+v", p)
		}
		args := p.Exec.Command[1:]
		if out, err := dnsguard(t, append(slices.Clone(args), "--help")...); err != nil {
			t.Errorf("dnsguard %q: %v\n%s", args, err, out)
		}
		if !slices.Contains(args, "--control="+cfg.Control) || slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--config") }) {
			t.Errorf("probe %q, control socket %s", args, cfg.Control)
		}
		if ready := slices.Contains(args, "--ready"); ready != (p == c.ReadinessProbe) {
			t.Errorf("probe %q", args)
		}
		// On the pod network it is readiness that leads queries to a pod; with interception
		// it decides about roll-outs, and one late answer must not end a pod that works.
		failures := int32(3)
		if p == c.ReadinessProbe && !spec.HostNetwork {
			failures = 1
		}
		if p.FailureThreshold != failures {
			t.Errorf("probe %q fails after %d, want %d", args, p.FailureThreshold, failures)
		}
		for _, a := range args {
			if text, ok := strings.CutPrefix(a, "--timeout="); ok {
				if d, err := time.ParseDuration(text); err != nil || d >= time.Duration(p.TimeoutSeconds)*time.Second {
					t.Errorf("probe waits %s of %d s: kubelet would end it before it says why", text, p.TimeoutSeconds)
				}
			}
		}
	}
}

// checkUpdate: two processes share addresses only by interception.
func checkUpdate(t *testing.T, cfg *config.Config, ds *appsv1.DaemonSet) {
	t.Helper()
	u := ds.Spec.UpdateStrategy
	if u.Type != appsv1.RollingUpdateDaemonSetStrategyType || u.RollingUpdate == nil {
		t.Fatalf("%+v", u)
	}
	surge, unavailable := u.RollingUpdate.MaxSurge.String(), u.RollingUpdate.MaxUnavailable.String()
	overlaps := cfg.Intercept.Mode != config.InterceptNone || !ds.Spec.Template.Spec.HostNetwork
	switch {
	case overlaps && (surge == "0" || unavailable != "0"):
		t.Errorf("maxSurge %s, maxUnavailable %s: old pods go first", surge, unavailable)
	case !overlaps && (surge != "0" || unavailable == "0"):
		t.Errorf("maxSurge %s, maxUnavailable %s: new pods would find their addresses taken", surge, unavailable)
	}
}

// checkMemory: Go's heap keeps to the request, and that to four fifths of the limit and to
// 48 MiB less than it, as docs/OPERATIONS.md (Sizing) tells everybody.
func checkMemory(t *testing.T, c corev1.Container) {
	t.Helper()
	from := ""
	for _, e := range c.Env {
		if e.Name == "GOMEMLIMIT" && e.ValueFrom != nil && e.ValueFrom.ResourceFieldRef != nil && e.ValueFrom.ResourceFieldRef.Divisor.IsZero() {
			from = e.ValueFrom.ResourceFieldRef.Resource
		}
	}
	if from != "requests.memory" {
		t.Errorf("GOMEMLIMIT comes from %q", from)
	}
	heap, limit := c.Resources.Requests.Memory().Value(), c.Resources.Limits.Memory().Value()
	const mebi = 1 << 20
	if most := min(limit*4/5+mebi, limit-48*mebi); heap > most || heap < most*9/10 {
		t.Errorf("heap %d of %d bytes; %d at most", heap, limit, most)
	}
	if !c.Resources.Limits.Cpu().IsZero() {
		t.Errorf("a CPU limit of %v: throttled, it is let past", c.Resources.Limits.Cpu())
	}
}
