package kube

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// State is what the cluster says at one moment. It is immutable. A part that is
// nil is not known yet, or not wanted; a part that says nothing new is the same
// pointer, map or slice as in the state before.
type State struct {
	// Guard is for the guard: the watched Services and their endpoints.
	Guard *ctguard.Snapshot

	// DNS is the cluster's DNS Service, without addresses if there is no
	// such Service.
	DNS *DNSService

	// Clients are the search lists of this node's pods by address. The list
	// is nil for an address of which it is known that none can be read off.
	Clients map[netip.Addr]*search.List

	// Excluded are the pods' addresses that are not to be intercepted,
	// ascending.
	Excluded []netip.Addr

	// Missing are the configured Services that do not exist.
	Missing []Name
}

// DNSService is where the cluster's DNS Service is reached.
type DNSService struct {
	// ClusterIPs are of one or both families, the cluster's primary first.
	ClusterIPs []netip.Addr

	// UDP are its UDP ports. TCP are those of them that it has for TCP, too:
	// its metrics' port is none.
	UDP, TCP []uint16
}

// state makes the state of everything that the feeds hold. Their lock is held.
func (f *feeds) state(c Config, listOf func(search.Pod) *search.List) *State {
	next := &State{Guard: f.snapshot(c.Services)}
	if d := f.services[c.DNSService]; d != nil && d.watch.synced {
		dns := d.objects[c.DNSService].dns()
		next.DNS = &dns
	}
	if f.pods != nil && f.pods.watch.synced && (f.namespaces == nil || f.namespaces.watch.synced) {
		var annotated map[Name]namespace
		if f.namespaces != nil {
			annotated = f.namespaces.objects
		}
		next.Clients, next.Excluded = clients(f.pods.objects, annotated, listOf)
	}
	for name, feed := range f.services {
		if _, there := feed.objects[name]; !there && feed.watch.synced {
			next.Missing = append(next.Missing, name)
		}
	}
	slices.SortFunc(next.Missing, Name.compare)
	return next
}

// snapshot is the guard's part, without the node's addresses: nil before all
// that it is made of is known, since an endpoint that is left out of it is one that
// has gone. A Service that cannot be read, and never could, is not waited for: the
// guard has not heard of it.
func (f *feeds) snapshot(guardedNames []Name) *ctguard.Snapshot {
	if len(guardedNames) == 0 {
		return nil
	}
	g, known := new(ctguard.Snapshot), false
	for _, name := range guardedNames {
		svc, endpoints := f.services[name], f.slices[name]
		switch {
		case svc.watch.unreadable() || endpoints.watch.unreadable():
			continue
		case !svc.watch.synced || !endpoints.watch.synced:
			return nil
		}
		known = true
		if s, there := svc.objects[name]; there {
			g.Services = append(g.Services, guarded(name, s, slices.Collect(maps.Values(endpoints.objects))))
		}
	}
	if !known {
		return nil
	}
	return g
}

// addNodeAddrs completes a snapshot with the node's addresses, if they matter.
func (w *Watcher) addNodeAddrs(g *ctguard.Snapshot) {
	if g == nil || w.cfg.NodeAddrs == nil || !slices.ContainsFunc(g.Services, hasNodePort) {
		return
	}
	var addrs []netip.Addr
	for _, a := range w.cfg.NodeAddrs() {
		addrs = append(addrs, a.Unmap().WithZone(""))
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	if len(addrs) > 0 {
		w.nodeAddrs = slices.Compact(addrs)
	}
	g.NodeAddrs = w.nodeAddrs
}

func hasNodePort(s ctguard.Service) bool {
	return slices.ContainsFunc(s.Ports, func(p ctguard.Port) bool { return p.NodePort != 0 })
}

// since returns next, with the parts of last that say the same, and whether
// that is last altogether.
func (next *State) since(last *State) (*State, bool) {
	same := true
	keep(&same, &next.Guard, last.Guard)
	keep(&same, &next.DNS, last.DNS)
	keep(&same, &next.Clients, last.Clients)
	keep(&same, &next.Excluded, last.Excluded)
	keep(&same, &next.Missing, last.Missing)
	return next, same
}

// keep puts before in the place of *now if they say the same.
func keep[T any](same *bool, now *T, before T) {
	if reflect.DeepEqual(*now, before) {
		*now = before
		return
	}
	*same = false
}
