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
				s[*p.Name] = append(s[*p.Name], newEndpoint(netip.AddrPortFrom(addr, port), e.Conditions))
			}
		}
	}
	return s
}

// newEndpoint takes an endpoint that is ready without serving for one that
// terminates. A Service with publishNotReadyAddresses has such: kube-proxy sends
// them new flows, of which each deleted one would lose an answer if they do
// answer. If they do not, the guard's probes tell.
func newEndpoint(addr netip.AddrPort, c discoveryv1.EndpointConditions) ctguard.Endpoint {
	e := ctguard.NewEndpoint(addr, c.Serving, c.Terminating)
	if !e.Serving && c.Ready != nil && *c.Ready {
		e.Serving, e.Terminating = true, true
	}
	return e
}

func isOfType(a netip.Addr, t discoveryv1.AddressType) bool {
	return a.Is4() && t == discoveryv1.AddressTypeIPv4 || a.Is6() && t == discoveryv1.AddressTypeIPv6
}

// endpoints returns the endpoints that the slices have for one port, by address
// and port, each once. While the controller moves an endpoint from one slice to
// another it can be in both, with different conditions. A flow is harmed only
// by believing the worse ones.
//
// A slice can have a name that none of the Service's UDP ports has: one of them
// has been given another name. The slices are written one after the other, and
// later, and they come over another watch. Until all agree, the endpoints of that
// name are every port's.
func endpoints(of []slice, port string, ports []servicePort) []ctguard.Endpoint {
	var all []ctguard.Endpoint
	for _, s := range of {
		for name, es := range s {
			if name == port || !slices.ContainsFunc(ports, func(p servicePort) bool { return p.udp && p.name == name }) {
				all = append(all, es...)
			}
		}
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
				Name: p.name, Port: p.number, NodePort: p.nodePort, Endpoints: endpoints(of, p.name, s.ports),
			})
		}
	}
	slices.SortStableFunc(g.Ports, func(a, b ctguard.Port) int { return cmp.Compare(a.Port, b.Port) })
	return g
}
