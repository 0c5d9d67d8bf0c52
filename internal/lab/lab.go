package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Lab is one laboratory: a node with its pods, and the gateway behind which
// nothing answers. Its methods are not safe for concurrent use; the things
// that it holds are.
type Lab struct {
	Node    *Node
	Gateway *Namespace
	// DNS is the kube-dns Service of the node's Proxy, at first without
	// endpoints: 10.96.0.10:53 and, with IPv6, [fd00:10:96::a]:53.
	DNS *Service
	// IPv6 tells whether the kernel has IPv6; without it everything here has
	// IPv4 addresses only.
	IPv6 bool

	pods []*Pod
	dns  []*DNSPod
}

// Node is the namespace of a Kubernetes node: it routes between its pods, and
// everything else to the gateway.
type Node struct {
	*Namespace
	IP4, IP6 netip.Addr // IP6 is the zero Addr without IPv6
	Proxy    *Proxy
}

// Names of the link between node and gateway, at its two ends.
const (
	uplink   = "eth0"
	downlink = "node0"
)

// New builds a laboratory without pods. Close it.
func New() (l *Lab, err error) {
	l = &Lab{IPv6: hasIPv6()}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("build the laboratory: %w", err), l.Close())
			l = nil
		}
	}()
	if l.Gateway, err = NewNamespace("gateway"); err != nil {
		return l, err
	}
	ns, err := NewNamespace("node")
	if err != nil {
		return l, err
	}
	l.Node = &Node{Namespace: ns, Proxy: NewProxy(ns)}
	l.Node.IP4, l.Node.IP6 = l.addresses(nodeNet4, nodeNet6, nodeHost)
	frontends := []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr(dnsVIP4), dnsPort)}
	if l.IPv6 {
		frontends = append(frontends, netip.AddrPortFrom(netip.MustParseAddr(dnsVIP6), dnsPort))
	}
	if err = l.connectGateway(); err != nil {
		return l, err
	}
	l.DNS, err = l.Node.Proxy.AddService("kube-dns", frontends...)
	return l, err
}

// networks returns those of the two networks whose family this kernel has.
func (l *Lab) networks(v4, v6 string) []netip.Prefix {
	nets := []netip.Prefix{netip.MustParsePrefix(v4)}
	if l.IPv6 {
		nets = append(nets, netip.MustParsePrefix(v6))
	}
	return nets
}

// addresses returns the addresses with a host number in the two networks; the
// second is the zero Addr without IPv6.
func (l *Lab) addresses(v4, v6 string, number byte) (ip4, ip6 netip.Addr) {
	both := hosts(l.networks(v4, v6), number)
	if len(both) > 1 {
		ip6 = both[1]
	}
	return both[0], ip6
}

// connectGateway makes the gateway the node's default route. It swallows what
// it gets: it does not forward, which is silent for IPv4, and has a blackhole
// route, which is silent for IPv6 too (where a missing route is answered with
// an ICMP error). So the address of a pod that is gone behaves as on a real
// network: nothing comes back.
func (l *Lab) connectGateway() error {
	if err := addVeth(l.Node.Namespace, uplink, l.Gateway, downlink); err != nil {
		return err
	}
	nets := l.networks(nodeNet4, nodeNet6)
	err := l.Gateway.configure(downlink, func(link netlink.Link) error {
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring up: %w", err)
		}
		for _, n := range nets {
			if err := addAddress(link, ipNet(netip.PrefixFrom(host(n, gatewayHost), n.Bits()))); err != nil {
				return err
			}
			swallow := &netlink.Route{Dst: defaultRoute(n.Addr()), Type: unix.RTN_BLACKHOLE}
			if err := netlink.RouteAdd(swallow); err != nil {
				return fmt.Errorf("add blackhole route: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = l.Node.configure(uplink, func(link netlink.Link) error {
		forwarding := []string{"net.ipv4.conf.all.forwarding"}
		if l.IPv6 {
			forwarding = append(forwarding, "net.ipv6.conf.all.forwarding")
		}
		for _, key := range forwarding {
			if err := writeSysctl(key, "1"); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring up: %w", err)
		}
		for _, n := range nets {
			if err := addAddress(link, ipNet(netip.PrefixFrom(host(n, nodeHost), n.Bits()))); err != nil {
				return err
			}
			via := host(n, gatewayHost)
			if err := addRoute(link, defaultRoute(via), via.AsSlice()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := l.Node.awaitLink(uplink, hosts(nets, nodeHost)...); err != nil {
		return err
	}
	return l.Gateway.awaitLink(downlink, hosts(nets, gatewayHost)...)
}

// AddAddress puts an address on the node's loopback device, as a listening
// address for a daemon there; pods reach it over their default route.
func (n *Node) AddAddress(addr netip.Addr) error {
	return n.configure("lo", func(link netlink.Link) error {
		if err := addAddress(link, single(addr)); err != nil {
			return err
		}
		return awaitLocal(addr)
	})
}

// AddPod connects a new pod to the node.
func (l *Lab) AddPod(name string) (*Pod, error) {
	number := firstPod + len(l.pods)
	if number > lastPod {
		return nil, fmt.Errorf("add pod %s: the pod network is full", name)
	}
	p, err := newPod(l, name, byte(number))
	if err != nil {
		return nil, fmt.Errorf("add pod %s: %w", name, err)
	}
	l.pods = append(l.pods, p)
	return p, nil
}

// AddDNS adds a pod with a stand-in CoreDNS that answers on port 53 from the
// zones. It is not an endpoint of DNS until SetEndpoints names it.
func (l *Lab) AddDNS(ctx context.Context, name string, zones ...*Zone) (*DNSPod, error) {
	p, err := l.AddPod(name)
	if err != nil {
		return nil, err
	}
	s, err := NewDNSServer(ctx, p.Namespace, zones, p.Endpoints()...)
	if err != nil {
		return nil, fmt.Errorf("serve in pod %s: %w", name, err)
	}
	d := &DNSPod{Pod: p, Server: s}
	l.dns = append(l.dns, d)
	return d, nil
}

// Close ends every process and stand-in of the laboratory and gives its
// namespaces up. Sockets that others made in them are theirs to close.
func (l *Lab) Close() error {
	var errs []error
	for _, d := range l.dns {
		errs = append(errs, d.Server.Close())
	}
	for _, p := range l.pods {
		errs = append(errs, p.Close())
	}
	if l.Node != nil {
		errs = append(errs, l.Node.Close())
	}
	if l.Gateway != nil {
		errs = append(errs, l.Gateway.Close())
	}
	return errors.Join(errs...)
}
