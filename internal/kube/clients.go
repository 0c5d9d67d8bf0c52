package kube

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// claim is who has an address.
type claim struct {
	pod     *pod
	shared  bool // by the whole node, or by pods of which none is the newest
	exclude bool
}

// clients returns the search lists of this node's pods by address, and the
// addresses that are not to be intercepted, ascending.
//
// An address that is known to have no list of its own is in the map with nil:
// it must not be walked for by guessing either. So are the node's addresses,
// which processes with different lists share, and an address of which it is
// unclear which pod has it.
func clients(pods map[Name]pod, namespaces map[Name]namespace, listOf func(search.Pod) *search.List) (map[netip.Addr]*search.List, []netip.Addr) {
	claims := make(map[netip.Addr]claim)
	for _, p := range pods {
		if !p.has() {
			continue
		}
		ns := namespaces[Name{Name: p.dns.Namespace}]
		c := claim{pod: &p, shared: p.dns.HostNetwork, exclude: p.excluded(ns) && !p.dns.HostNetwork}
		for _, a := range p.addrs {
			if other, taken := claims[a]; taken {
				claims[a] = c.over(other)
			} else {
				claims[a] = c
			}
		}
	}
	var lists map[netip.Addr]*search.List
	if listOf != nil {
		lists = make(map[netip.Addr]*search.List, len(claims))
	}
	excluded := []netip.Addr{}
	for a, c := range claims {
		if c.exclude {
			excluded = append(excluded, a)
		}
		if listOf == nil {
			continue
		}
		lists[a] = nil
		// A pod's list counts once it runs. Before, it only hides those of
		// the address's former owners.
		if !c.shared && !c.pod.unclear && c.pod.phase == corev1.PodRunning {
			dns := c.pod.dns
			dns.Expand = namespaces[Name{Name: dns.Namespace}].expand
			lists[a] = listOf(dns)
		}
	}
	slices.SortFunc(excluded, netip.Addr.Compare)
	return lists, excluded
}

// over decides between two claims to one address. It does not matter in which
// order several are compared.
func (c claim) over(other claim) claim {
	if c.pod.dns.HostNetwork != other.pod.dns.HostNetwork {
		if c.pod.dns.HostNetwork {
			return c
		}
		return other
	}
	switch c.pod.newer(other.pod) {
	case +1:
		return c
	case -1:
		return other
	}
	c.shared = true
	c.exclude = c.exclude || other.exclude // who is let past us is never wrong
	return c
}
