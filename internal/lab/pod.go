package lab

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// podLink is a pod's device, as in Kubernetes.
const podLink = "eth0"

// dnsPort is the port of DNS, RFC 1035 section 4.2.
const dnsPort = 53

// Pod is a namespace connected to the node by a veth pair, routed as most CNI
// plugins do it: a host address, the default route over a link-scoped gateway.
type Pod struct {
	*Namespace
	Name     string
	IP4, IP6 netip.Addr // IP6 is the zero Addr without IPv6

	lab  *Lab
	veth string // the node's end
}

// newPod makes the pod with the given host number.
func newPod(l *Lab, name string, number byte) (p *Pod, err error) {
	p = &Pod{Name: name, lab: l, veth: fmt.Sprintf("veth%d", number)}
	p.IP4, p.IP6 = l.addresses(podNet4, podNet6, number)
	if p.Namespace, err = NewNamespace(name); err != nil {
		return nil, err
	}
	if err = p.connect(number); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// connect plugs the pod into the node.
func (p *Pod) connect(number byte) error {
	node := p.lab.Node.Namespace
	nets := p.lab.networks(podNet4, podNet6)
	if err := addVeth(node, p.veth, p.Namespace, podLink); err != nil {
		return err
	}
	err := node.configure(p.veth, func(link netlink.Link) error {
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring up: %w", err)
		}
		for _, n := range nets {
			if err := addAddress(link, single(host(n, gatewayHost))); err != nil {
				return err
			}
			if err := addRoute(link, single(host(n, number)), nil); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = p.configure(podLink, func(link netlink.Link) error {
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring up: %w", err)
		}
		for _, n := range nets {
			via := host(n, gatewayHost)
			if err := addAddress(link, single(host(n, number))); err != nil {
				return err
			}
			if err := addRoute(link, single(via), nil); err != nil {
				return err
			}
			if err := addRoute(link, defaultRoute(via), via.AsSlice()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := p.awaitLink(podLink, hosts(nets, number)...); err != nil {
		return err
	}
	return node.awaitLink(p.veth, hosts(nets, gatewayHost)...)
}

// Unplug removes the pod's link, and with it the node's route to the pod: what
// is sent to its address from now on goes to the gateway and vanishes. What
// runs in the pod runs on, cut off.
func (p *Pod) Unplug() error {
	return p.lab.Node.configure(p.veth, netlink.LinkDel)
}

// Endpoints returns the pod's port 53 in every family that it has.
func (p *Pod) Endpoints() []netip.AddrPort {
	eps := []netip.AddrPort{netip.AddrPortFrom(p.IP4, dnsPort)}
	if p.IP6.IsValid() {
		eps = append(eps, netip.AddrPortFrom(p.IP6, dnsPort))
	}
	return eps
}

// DNSPod is a pod with a stand-in CoreDNS in it.
type DNSPod struct {
	*Pod
	Server *DNSServer
}

// Kill is the abrupt end of pod and server, as of a node that loses power: the
// link goes first, so that no ICMP error tells a client that the socket has
// gone. (For a process that dies in a living pod, close Server instead:
// clients are then refused.)
func (d *DNSPod) Kill() error {
	return errors.Join(d.Unplug(), d.Server.Close())
}

// Endpoints returns the endpoints of the pods together, for a Service.
func Endpoints(pods ...*DNSPod) []netip.AddrPort {
	var eps []netip.AddrPort
	for _, p := range pods {
		eps = append(eps, p.Endpoints()...)
	}
	return eps
}
