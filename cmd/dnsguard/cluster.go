package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// newWatcher returns what follows the cluster's objects, or nil where the
// configuration wants none. It reads nothing yet.
func (d *daemon) newWatcher(cfg *config.Config, policy *search.Policy) (*kube.Watcher, error) {
	if cfg.Kubernetes.Source == config.SourceNone {
		return nil, nil
	}
	c := kube.Config{
		DNSService: kube.Name(cfg.Kubernetes.DNSService),
		// Namespaces are watched for the annotations that matter to the
		// node's pods.
		Namespaces: true,
		Pods:       true,
		NodeName:   cfg.Kubernetes.NodeName,
		ListOf:     policy.ListOf,
		NodeAddrs:  interfaceAddrs,
		OnChange:   d.onCluster,
		OnProblem: func(p kube.Problem) {
			d.kubeReadiness()
			if g := d.guarding.Load(); g != nil {
				g.guard.Doubt(d.outOfTouch())
			}
			if p.Err != nil {
				d.log.Warn("watching the cluster does not get on; what was known stays in force", "watch", p.Watch, "error", p.Err)
				return
			}
			d.log.Info("watching the cluster gets on again", "watch", p.Watch)
		},
	}
	if c.NodeName == "" {
		c.NodeName = os.Getenv("NODE_NAME")
	}
	d.nodeName.Store(&c.NodeName)
	if c.NodeName == "" {
		if cfg.Kubernetes.Source == config.SourceAPI { // a file may say nothing of pods
			d.tellNode(nodeProblem("", nil, nil))
		}
		c.Pods, c.Namespaces = false, false
	}
	// An API server is asked for them.
	d.podsWatched.Store(c.Pods && cfg.Kubernetes.Source == config.SourceAPI)
	for _, s := range guardedServices(cfg) {
		c.Services = append(c.Services, kube.Name(s))
	}
	if cfg.Kubernetes.Source == config.SourceFile {
		c.Source = kube.NewFile(cfg.Kubernetes.File)
	} else {
		api, err := kube.NewAPI(kube.APIConfig{Kubeconfig: cfg.Kubernetes.Kubeconfig, Version: version})
		if err != nil {
			return nil, err
		}
		c.Source = api
	}
	return kube.New(c)
}

// clusterApplied is the condition that the interception has heard of the cluster.
const clusterApplied = "intercept cluster"

// onCluster takes a new state of the cluster.
func (d *daemon) onCluster(s *kube.State) {
	d.guardMu.Lock()
	before := d.cluster.Load()
	s = keepKnown(s, before, kube.Name(d.config().Kubernetes.DNSService))
	d.cluster.Store(s)
	if g := d.guarding.Load(); s.Guard != nil && g != nil {
		g.guard.Update(s.Guard)
	}
	d.guardMu.Unlock()
	if before == nil && d.config().Intercept.Mode != config.InterceptNone {
		// Before the condition of the cluster goes.
		d.conditions.notReady(clusterApplied, "what the cluster says is not applied yet")
	}
	d.missing(before, s)
	d.checkNode(s)
	d.kubeReadiness()
	kick(d.clusterChanged)
	if s.DNS != nil && !slices.Equal(s.DNS.ClusterIPs, d.serviceInUse()) {
		kick(d.serviceChanged)
	}
}

// missing tells, each time that it changes, which configured Services do not
// exist.
func (d *daemon) missing(before, s *kube.State) {
	names := make([]string, len(s.Missing))
	for i, n := range s.Missing {
		names[i] = n.String()
	}
	text := ""
	if len(names) > 0 {
		text = "no such Service: " + strings.Join(names, ", ")
	}
	d.conditions.warn("kubernetes services", text)
	var was []kube.Name
	if before != nil {
		was = before.Missing
	}
	switch {
	case slices.Equal(was, s.Missing):
	case text != "":
		d.log.Warn("configured Services do not exist; they are taken up when they appear", "services", names)
	default:
		d.log.Info("all configured Services exist")
	}
}

// keepKnown is s with what was known before of the parts that it does not know
// yet, as when the watches have begun anew. The guard's part is not kept: it may
// be of other Services.
//
// A DNS Service that is deleted, most likely to be made anew, keeps its addresses
// until then: pods go on asking them, and the one that the environment tells may be of
// before a change, and somebody else's by now.
func keepKnown(s, before *kube.State, dnsService kube.Name) *kube.State {
	if before == nil {
		return s
	}
	kept := *s
	if kept.DNS == nil || before.DNS != nil && slices.Contains(s.Missing, dnsService) {
		kept.DNS = before.DNS
	}
	if kept.Clients == nil {
		kept.Clients = before.Clients
	}
	if kept.Excluded == nil {
		kept.Excluded = before.Excluded
	}
	return &kept
}

// checkNode looks whether the pods that the API server has told of are this node's. A
// file may say nothing of pods.
func (d *daemon) checkNode(s *kube.State) {
	name := *d.nodeName.Load()
	if name == "" || d.config().Kubernetes.Source != config.SourceAPI || s.Clients == nil {
		return
	}
	var own []netip.Addr
	if !d.nodeSeen.Load() && len(s.Clients) > 0 {
		own = interfaceAddrs()
	}
	problem := nodeProblem(name, s.Clients, own)
	d.nodeSeen.Store(problem == "")
	d.tellNode(problem)
}

// tellNode keeps the warning that this node's pods are not seen, and logs it once.
func (d *daemon) tellNode(problem string) {
	d.nodeInDoubt.Store(problem != "")
	switch news := d.conditions.warn("kubernetes node", problem); {
	case !news:
	case problem != "":
		d.log.Warn("this node's pods are not seen", "problem", problem)
	default:
		d.log.Info("this node's pods are seen")
	}
}

// nodeProblem tells what is wrong with the name of the node, by the addresses of its
// pods. Every node has some, and our own pod is one of them: without any, another
// node's were asked for. So they were where none has an address of this machine, as
// pods on the host network do. Where its addresses are not given, nothing is said of
// that.
func nodeProblem(name string, pods map[netip.Addr]*search.List, own []netip.Addr) string {
	const remedy = "set it to the name in the cluster (kubectl get nodes) and restart"
	switch {
	case name == "":
		return "kubernetes.nodeName and $NODE_NAME are empty: this node's pods are not watched, search lists are read off the names, and annotations are not seen"
	case len(pods) == 0:
		return fmt.Sprintf("no pod is on node %q (kubernetes.nodeName, $NODE_NAME): no search list is known, and annotations are not seen; %s", name, remedy)
	}
	isOwn := func(a netip.Addr) bool {
		_, is := pods[a]
		return is
	}
	if len(own) > 0 && !slices.ContainsFunc(own, isOwn) {
		return fmt.Sprintf("no pod on node %q (kubernetes.nodeName, $NODE_NAME) has an address of this machine: is it another's? Then no search list is known, and annotations are not seen; %s", name, remedy)
	}
	return ""
}

// kick wakes whoever listens to a channel of capacity 1, unless it is going to
// wake anyway.
func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// firstState is how long a command waits for the cluster to tell the address of
// its DNS Service, where nothing else does. The daemon goes on.
const firstState = 5 * time.Second

// awaitService waits until the address of the cluster's DNS Service is known, if it
// is needed, and asks it from then on.
func (d *daemon) awaitService(ctx context.Context) error {
	if d.upstream() != nil {
		return nil
	}
	first, cancel := context.WithTimeout(ctx, firstState)
	defer cancel()
	for len(d.clusterIPs()) == 0 {
		if s := d.cluster.Load(); first.Err() != nil || s != nil && s.DNS != nil {
			return d.serviceUnknown(d.config())
		}
		select {
		case <-d.clusterChanged:
		case <-first.Done():
		}
	}
	return d.followService(ctx)
}

// awaitsService reports whether the addresses of the cluster's DNS Service are
// needed, to ask or to take them, and not known.
func (d *daemon) awaitsService() bool {
	return len(d.clusterIPs()) == 0 && (d.upstream() == nil || d.config().Intercept.Mode == config.InterceptClusterIP)
}

// clusterIPs returns the addresses of the cluster's DNS Service, at most one of
// each family: as the cluster says or, before it is heard, as the environment
// does.
func (d *daemon) clusterIPs() []netip.Addr {
	ips, _ := d.clusterIPsHeard()
	return ips
}

// clusterIPsHeard is clusterIPs, and whether it is the cluster that says so.
func (d *daemon) clusterIPsHeard() (ips []netip.Addr, heard bool) {
	if s := d.cluster.Load(); s != nil && s.DNS != nil && len(s.DNS.ClusterIPs) > 0 {
		return s.DNS.ClusterIPs, true
	}
	return serviceFromEnvironment(d.config().Kubernetes.DNSService), false
}

// excludedClients returns the pods that asked not to be intercepted.
func (d *daemon) excludedClients() []netip.Addr {
	if s := d.cluster.Load(); s != nil {
		return s.Excluded
	}
	return nil
}

// searchList returns the list of a client by its address, as
// resolver.Search.Client has it.
func (d *daemon) searchList(a netip.Addr) (list *search.List, known bool) {
	var pods map[netip.Addr]*search.List
	if s := d.cluster.Load(); s != nil {
		pods = s.Clients
	}
	list, known = pods[a]
	// Where pods are watched, an address that is none of theirs has no list that
	// could be known: a pod so new that its address has not come yet, a process on
	// the host, somebody behind another address. To go by the name would be to guess
	// against better knowledge.
	return list, known || d.podsWatched.Load() || len(pods) > 0
}

// kubeReadiness keeps the condition of the cluster's objects.
func (d *daemon) kubeReadiness() {
	watcher := d.watcher()
	if watcher == nil {
		return
	}
	s := watcher.Stats()
	text := ""
	if !s.Synced {
		text = "not read yet: " + strings.Join(unread(s), "; ")
	}
	if d.refollows.Load() {
		d.conditions.notReady("kubernetes", "")
	} else {
		d.conditions.notReady("kubernetes", text)
		text = ""
	}
	for _, w := range s.Watches {
		if w.Synced && w.Err != nil {
			text = "out of date: " + w.Name + ": " + w.Err.Error()
		}
	}
	d.conditions.warn("kubernetes", text)
}

// unread tells which watches have brought nothing yet, and why: one that cannot get
// on, such as for want of a permission, hides no other.
func unread(s kube.Stats) (watches []string) {
	for _, w := range s.Watches {
		switch {
		case w.Synced:
		case w.Err != nil:
			watches = append(watches, w.Name+": "+w.Err.Error())
		default:
			watches = append(watches, w.Name)
		}
	}
	return watches
}

// unreadServices is unread for the watches that matter to the guard.
func unreadServices(s kube.Stats) []string {
	return slices.DeleteFunc(unread(s), func(w string) bool { return !ofServices(w) })
}

// ofServices reports whether a watch is of Services or their endpoints.
func ofServices(watch string) bool {
	return !strings.HasPrefix(watch, "pods") && !strings.HasPrefix(watch, "namespaces")
}

// outOfTouch tells that what is known of Services and endpoints may be old. Of what
// could never be read nothing is known.
func (d *daemon) outOfTouch() bool {
	w := d.watcher()
	return w != nil && slices.ContainsFunc(w.Stats().Watches, func(s kube.WatchStats) bool {
		return s.Synced && s.Err != nil && ofServices(s.Name)
	})
}

// interfaceAddrs returns the addresses of this machine's interfaces.
func interfaceAddrs() []netip.Addr {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() {
			out = append(out, p.Addr().Unmap().WithZone(""))
		}
	}
	return out
}

// following is a watcher at work.
type following struct {
	watcher *kube.Watcher
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// follow follows the cluster from now on, if there is a watcher, until its end.
func (d *daemon) follow(ctx context.Context, w *kube.Watcher) {
	if w == nil {
		return
	}
	f := &following{watcher: w}
	ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	d.following.Store(f)
	f.running.Go(func() { w.Run(ctx) })
}

// end ends the watching, if there is any.
func (f *following) end() {
	if f != nil {
		f.cancel()
		f.running.Wait()
	}
}

// watcher returns what follows the cluster's objects, or nil.
func (d *daemon) watcher() *kube.Watcher {
	if f := d.following.Load(); f != nil {
		return f.watcher
	}
	return nil
}
