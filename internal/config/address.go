package config

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
)

const dnsPort = 53

// A Server is one of an upstream's servers: exactly one field is set.
type Server struct {
	Service bool           // kubernetes.dnsService, through the cluster's own DNAT path
	File    string         // the nameservers of this resolv.conf, which may change
	Addr    netip.AddrPort // this one
}

// serverService is the word for the cluster's DNS Service.
const serverService = "service"

// String returns the server as the file takes it.
func (s Server) String() string {
	switch {
	case s.Service:
		return serverService
	case s.File != "":
		return s.File
	}
	return s.Addr.String()
}

func parseServer(text string) (Server, string) {
	switch {
	case text == serverService:
		return Server{Service: true}, ""
	case filepath.IsAbs(text):
		file, wrong := parsePath(text)
		return Server{File: file}, wrong
	}
	addr, wrong := parseAddrPort(text)
	if wrong == "" && addr.Addr().IsUnspecified() {
		return Server{}, "is the unspecified address"
	}
	return Server{Addr: addr}, wrong
}

// parseAddrPort reads IP[:port], IPv6 with or without brackets. IPv4-mapped
// addresses become IPv4: sockets and packets show them so.
func parseAddrPort(text string) (netip.AddrPort, string) {
	addrPort, err := netip.ParseAddrPort(text)
	if err != nil {
		addr, err := netip.ParseAddr(unbracket(text))
		if err != nil {
			return netip.AddrPort{}, wrongAddrPort(text)
		}
		addrPort = netip.AddrPortFrom(addr, dnsPort)
	}
	addr := addrPort.Addr().Unmap()
	switch {
	case addrPort.Port() == 0:
		return netip.AddrPort{}, "has a port outside 1 to 65535"
	case addr.IsMulticast():
		return netip.AddrPort{}, "is a multicast address"
	}
	return netip.AddrPortFrom(addr, addrPort.Port()), ""
}

// unbracket takes the brackets off an IPv6 address without a port.
func unbracket(text string) string {
	if inner, ok := strings.CutPrefix(text, "["); ok && strings.Contains(inner, ":") {
		if inner, ok := strings.CutSuffix(inner, "]"); ok {
			return inner
		}
	}
	return text
}

func wrongAddrPort(text string) string {
	if host, _, err := net.SplitHostPort(text); err == nil {
		if _, err := netip.ParseAddr(host); err == nil {
			return "has a port outside 1 to 65535"
		}
	}
	return "is not an IP address"
}

// parsePrefix reads a CIDR, or one address as the CIDR that holds only it.
func parsePrefix(text string) (netip.Prefix, string) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), ""
	}
	prefix, err := netip.ParsePrefix(text)
	switch {
	case err != nil || prefix.Addr().Is4In6():
		return netip.Prefix{}, "is not a CIDR"
	case prefix != prefix.Masked():
		return netip.Prefix{}, fmt.Sprintf("has bits set beyond its length (%v?)", prefix.Masked())
	}
	return prefix, ""
}

// parseHTTP reads a TCP listening address. A name is not taken: resolving it
// would be the business of the server that is being started.
func parseHTTP(text string) (string, string) {
	if text == "" {
		return "", ""
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", "is not host:port"
	}
	if _, err := netip.ParseAddr(host); host != "" && err != nil {
		return "", "has a host that is not an IP address"
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", "has a port outside 1 to 65535"
	}
	return text, ""
}

func parsePath(text string) (string, string) {
	if strings.ContainsFunc(text, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) {
		return "", "has characters that cannot be printed"
	}
	return text, ""
}

// maxSocketPath is sun_path of unix(7) without its terminating NUL.
const maxSocketPath = 107

func parseSocketPath(text string) (string, string) {
	switch {
	case !filepath.IsAbs(text):
		return "", "is not an absolute path"
	case len(text) > maxSocketPath:
		return "", fmt.Sprintf("is %d bytes long", len(text))
	}
	return parsePath(text)
}
