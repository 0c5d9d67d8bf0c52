package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AddressError reports that an interface has an address that is to be
// intercepted: packets would be delivered there whatever happens to us.
type AddressError struct {
	Addr      netip.Addr
	Interface string
}

// Error names the setting and the remedy.
func (e *AddressError) Error() string {
	remedy := "remove it from the interface (ip addr del), or from listen"
	switch {
	case e.NodeLocal():
		remedy = "NodeLocal DNSCache has it; remove its DaemonSet"
	case e.Interface == "kube-ipvs0":
		remedy = "kube-proxy in IPVS mode owns ClusterIPs; set intercept.mode to link-local"
	}
	return fmt.Sprintf("listen: the address %v is on the interface %s: %s", e.Addr, e.Interface, remedy)
}

// NodeLocal reports whether it is the interface of NodeLocal DNSCache, which
// takes it away when it goes.
func (e *AddressError) NodeLocal() bool { return strings.HasPrefix(e.Interface, "nodelocaldns") }

// CheckAddresses returns an *AddressError if an interface has one of the
// addresses. Call it before Listen: our sockets would share the address with
// whoever serves it there.
func CheckAddresses(addrs []netip.Addr) error {
	list, err := steady(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok || !slices.Contains(addrs, ip.Unmap()) {
			continue
		}
		name := fmt.Sprintf("number %d", a.LinkIndex)
		if link, err := netlink.LinkByIndex(a.LinkIndex); err == nil {
			name = link.Attrs().Name
		}
		return &AddressError{Addr: ip.Unmap(), Interface: name}
	}
	return nil
}

// AwaitAddresses returns when no interface has any of the addresses, or with
// ctx's error. It learns of a change at once.
func AwaitAddresses(ctx context.Context, addrs []netip.Addr) error {
	w, err := watch(map[int][]uint32{unix.NETLINK_ROUTE: {groupAddress4, groupAddress6}})
	if err != nil {
		return err
	}
	defer func() { _ = w.close() }()
	again := time.NewTicker(checkEvery)
	defer again.Stop()
	for CheckAddresses(addrs) != nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.kick:
		case <-again.C: // a list may fail for a moment
		}
	}
	return nil
}
