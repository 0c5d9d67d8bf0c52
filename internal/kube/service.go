package kube

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
)

// service is what is kept of a Service.
type service struct {
	clusterIPs []netip.Addr
	external   []netip.Addr // external IPs, and a load balancer's
	ports      []servicePort
}

type servicePort struct {
	name     string
	udp, tcp bool
	number   uint16
	nodePort uint16 // 0: none
}

// newService keeps what kube-proxy makes rules from (ShouldSkipService,
// newBaseServiceInfo): a headless Service and an ExternalName have no address
// and no port to reach them at.
func newService(o *corev1.Service) service {
	var s service
	ips := o.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{o.Spec.ClusterIP}
	}
	if o.Spec.Type == corev1.ServiceTypeExternalName || ips[0] == "" || ips[0] == corev1.ClusterIPNone {
		return s
	}
	s.clusterIPs = parseAddrs(ips)
	s.external = parseAddrs(o.Spec.ExternalIPs)
	for _, ing := range o.Status.LoadBalancer.Ingress {
		// With ipMode Proxy the load balancer rewrites the destination, and
		// kube-proxy has no rule for its address.
		if ing.IPMode != nil && *ing.IPMode != corev1.LoadBalancerIPModeVIP {
			continue
		}
		if a, ok := parseAddr(ing.IP); ok {
			s.external = appendNew(s.external, a)
		}
	}
	for _, p := range o.Spec.Ports {
		number, ok := parsePort(p.Port)
		if !ok {
			continue
		}
		nodePort, _ := parsePort(p.NodePort)
		s.ports = append(s.ports, servicePort{
			name: p.Name, number: number, nodePort: nodePort,
			udp: p.Protocol == corev1.ProtocolUDP,
			tcp: p.Protocol == corev1.ProtocolTCP || p.Protocol == "", // the API's default
		})
	}
	return s
}

func (s service) addrs() []netip.Addr {
	addrs := append([]netip.Addr(nil), s.clusterIPs...)
	for _, a := range s.external {
		addrs = appendNew(addrs, a)
	}
	return addrs
}

// dns reads a Service as the cluster's DNS Service.
func (s service) dns() DNSService {
	d := DNSService{ClusterIPs: s.clusterIPs}
	for _, p := range s.ports {
		if p.udp {
			d.UDP = append(d.UDP, p.number)
		}
	}
	for _, p := range s.ports {
		for _, n := range d.UDP {
			if p.tcp && p.number == n {
				d.TCP = append(d.TCP, n)
			}
		}
	}
	return d
}
