package kube

import (
	"net/netip"
	"slices"

	netutils "k8s.io/utils/net"
)

// parseAddr reads an address as Kubernetes does. That includes IPv4 with
// leading zeros, which the API has accepted in the past and still keeps: an
// endpoint that kube-proxy knows and we do not would cost it its flows.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		ok := false
		if a, ok = netip.AddrFromSlice(netutils.ParseIPSloppy(s)); !ok {
			return netip.Addr{}, false
		}
	}
	a = a.Unmap()
	return a, a.Zone() == "" && !a.IsUnspecified()
}

// parseAddrs reads those that are addresses, each once.
func parseAddrs(texts []string) []netip.Addr {
	var addrs []netip.Addr
	for _, s := range texts {
		if a, ok := parseAddr(s); ok {
			addrs = appendNew(addrs, a)
		}
	}
	return addrs
}

func appendNew(addrs []netip.Addr, a netip.Addr) []netip.Addr {
	if slices.Contains(addrs, a) {
		return addrs
	}
	return append(addrs, a)
}

// parsePort returns n if it is a port number, else 0 and false.
func parsePort(n int32) (uint16, bool) {
	if n < 1 || n > 65535 {
		return 0, false
	}
	return uint16(n), true
}
