package kube

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/dnsguard/dnsguard/ctguard"
)

// slice is what is kept of an EndpointSlice: its UDP endpoints by the name of
// their port.
type slice map[string][]ctguard.Endpoint

// newSlice reads a slice as kube-proxy does (EndpointSliceCache.addEndpoints).
// The slice's address type decides the family; of an endpoint of type FQDN
// there is no address to be had.
func newSlice(o *discoveryv1.EndpointSlice) slice {
	s := slice{}
	for _, p := range o.Ports {
		if p.Name == nil || p.Port == nil || p.Protocol == nil || *p.Protocol != corev1.ProtocolUDP {
			continue
		}
		port, ok := parsePort(*p.Port)
		if !ok {
			continue
		}
		for _, e := range o.Endpoints {
			if len(e.Addresses) == 0 {
				continue
			}
			if addr, ok := parseAddr(e.Addresses[0]); ok && isOfType(addr, o.AddressType) {
				s[*p.Name] = append(s[*p.Name], ctguard.NewEndpoint(
					netip.AddrPortFrom(addr, port), e.Conditions.Serving, e.Conditions.Terminating,
				))
			}
		}
	}
	return s
}

func isOfType(a netip.Addr, t discoveryv1.AddressType) bool {
	return a.Is4() && t == discoveryv1.AddressTypeIPv4 || a.Is6() && t == discoveryv1.AddressTypeIPv6
}

// endpoints returns the endpoints that the slices have for one port, by address
// and port, each once. While the controller moves an endpoint from one slice to
// another it can be in both, with different conditions. A flow is harmed only
// by believing the worse ones.
func endpoints(of []slice, port string) []ctguard.Endpoint {
	var all []ctguard.Endpoint
	for _, s := range of {
		all = append(all, s[port]...)
	}
	slices.SortFunc(all, func(a, b ctguard.Endpoint) int { return a.Addr.Compare(b.Addr) })
	once := all[:0]
	for _, e := range all {
		if n := len(once); n > 0 && once[n-1].Addr == e.Addr {
			once[n-1].Serving = once[n-1].Serving || e.Serving
			once[n-1].Terminating = once[n-1].Terminating && e.Terminating
			continue
		}
		once = append(once, e)
	}
	return once
}

// guarded makes one Service of a snapshot.
func guarded(name Name, s service, of []slice) ctguard.Service {
	g := ctguard.Service{Name: name.String(), Addrs: s.addrs()}
	for _, p := range s.ports {
		if p.udp {
			g.Ports = append(g.Ports, ctguard.Port{
				Name: p.name, Port: p.number, NodePort: p.nodePort, Endpoints: endpoints(of, p.name),
			})
		}
	}
	slices.SortStableFunc(g.Ports, func(a, b ctguard.Port) int { return cmp.Compare(a.Port, b.Port) })
	return g
}
