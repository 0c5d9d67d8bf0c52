package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The address plan: a kubeadm cluster's usual ranges, and a twin for IPv6.
const (
	nodeNet4 = "172.30.0.0/24"
	nodeNet6 = "fd00:172:30::/64"
	podNet4  = "10.244.0.0/24"
	podNet6  = "fd00:10:244::/64"
	dnsVIP4  = "10.96.0.10"
	dnsVIP6  = "fd00:10:96::a"
)

// Host numbers in the networks above.
const (
	gatewayHost = 1 // the gateway's in the node network, the node's in the pod network
	nodeHost    = 2
	firstPod    = 2
	lastPod     = 254
)

// readyTimeout bounds the wait for new links and addresses to work: some
// milliseconds on an idle machine.
const readyTimeout = 10 * time.Second

// host returns the address with the given host number in a network.
func host(p netip.Prefix, number byte) netip.Addr {
	if p.Addr().Is4() {
		b := p.Addr().As4()
		b[3] = number
		return netip.AddrFrom4(b)
	}
	b := p.Addr().As16()
	b[15] = number
	return netip.AddrFrom16(b)
}

// hosts returns the address with the given host number in each network.
func hosts(networks []netip.Prefix, number byte) []netip.Addr {
	var addrs []netip.Addr
	for _, n := range networks {
		addrs = append(addrs, host(n, number))
	}
	return addrs
}

// ipNet converts a prefix for package netlink.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// single is the prefix that holds addr alone.
func single(addr netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(addr, addr.BitLen())) }

// addVeth makes a veth pair between two namespaces. Either end's removal, or
// the end of either namespace, removes both.
func addVeth(a *Namespace, nameA string, b *Namespace, nameB string) error {
	fd, err := b.fd()
	if err != nil {
		return err
	}
	return a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = nameA
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(fd)}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("add veth %s in %s to %s in %s: %w", nameA, a, nameB, b, err)
		}
		return nil
	})
}

// configure runs on the namespace's thread with one of its links.
func (n *Namespace) configure(name string, f func(netlink.Link) error) error {
	return n.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s in %s: %w", name, n, err)
		}
		if err := f(link); err != nil {
			return fmt.Errorf("configure link %s in %s: %w", name, n, err)
		}
		return nil
	})
}

// addAddress puts an address on a link; IPv6 addresses work at once.
func addAddress(link netlink.Link, p *net.IPNet) error {
	a := &netlink.Addr{IPNet: p}
	if p.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrAdd(link, a); err != nil {
		return fmt.Errorf("add address %v: %w", p, err)
	}
	return nil
}

// addRoute adds a route; via may be nil for a link-scoped one.
func addRoute(link netlink.Link, dst *net.IPNet, via net.IP) error {
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Gw: via}
	if via == nil {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := netlink.RouteAdd(r); err != nil {
		return fmt.Errorf("add route to %v: %w", dst, err)
	}
	return nil
}

// defaultRoute is the destination that matches every address of via's family.
func defaultRoute(via netip.Addr) *net.IPNet {
	return ipNet(netip.PrefixFrom(via, 0).Masked())
}

// awaitLink waits until a link works and the addresses on it too.
func (n *Namespace) awaitLink(name string, addrs ...netip.Addr) error {
	return n.configure(name, func(link netlink.Link) error {
		if err := awaitCarrier(link); err != nil {
			return err
		}
		return awaitLocal(addrs...)
	})
}

// awaitCarrier waits until the link passes packets. The kernel gives a link
// its queue some time after its peer came up, and drops packets until then.
func awaitCarrier(link netlink.Link) error {
	return await("carrier", func() (bool, error) {
		l, err := netlink.LinkByIndex(link.Attrs().Index)
		if err != nil {
			return false, fmt.Errorf("read link state: %w", err)
		}
		return l.Attrs().OperState == netlink.OperUp, nil
	})
}

// awaitLocal waits until packets to the addresses are delivered here. An IPv6
// address can be bound as soon as it is added, but its route follows from a
// work queue of the kernel: until then the node calls it unreachable.
func awaitLocal(addrs ...netip.Addr) error {
	for _, addr := range addrs {
		err := await("local route to "+addr.String(), func() (bool, error) {
			routes, err := netlink.RouteGet(addr.AsSlice())
			if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
				return false, nil
			}
			if err != nil {
				return false, fmt.Errorf("look up the route to %v: %w", addr, err)
			}
			return len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// await asks until the answer is yes. The kernel announces neither of the
// above in a way that would be simpler, or sooner.
func await(what string, ready func() (bool, error)) error {
	deadline := time.Now().Add(readyTimeout)
	for {
		ok, err := ready()
		if ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no %s after %v", what, readyTimeout)
		}
		time.Sleep(time.Millisecond)
	}
}
