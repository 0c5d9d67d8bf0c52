package lab

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables"
)

// Proxy programs Services into a namespace's nftables the way kube-proxy does:
// a table of its name in each family, DNAT to one of the endpoints by random
// choice for each new flow, UDP and TCP alike, from pods (prerouting) and from
// the node itself (output); a Service without endpoints is rejected. A change
// is one transaction per family.
//
// Like some kube-proxies, it never touches conntrack: flows that exist keep
// their endpoint. Unlike kube-proxy it does not masquerade the node's own
// flows. The pods need no masquerading to answer the node, and a flow
// masqueraded over a veth would be forgotten by the kernel when the veth goes
// (nf_nat_masquerade watches devices), which would heal what a laboratory of
// one node has to show: there, the pod's death takes a device with it; in a
// cluster, the pod is mostly on another node.
//
// Methods are safe for concurrent use.
type Proxy struct {
	ns *Namespace

	mu       sync.Mutex
	services []*Service
	held     bool
}

// Service is one Service of a Proxy.
type Service struct {
	proxy     *Proxy
	name      string
	frontends []netip.AddrPort
	endpoints []netip.AddrPort // guarded by proxy.mu
}

// NewProxy returns a Proxy for the namespace, without Services and rules.
func NewProxy(ns *Namespace) *Proxy { return &Proxy{ns: ns} }

// AddService adds a Service without endpoints; name goes into chain names.
func (p *Proxy) AddService(name string, frontends ...netip.AddrPort) (*Service, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &Service{proxy: p, name: name, frontends: frontends}
	p.services = append(p.services, s)
	return s, p.sync()
}

// SetEndpoints replaces the Service's endpoints; those of a family serve the
// frontends of that family. It takes effect at once, or at Release.
func (s *Service) SetEndpoints(endpoints ...netip.AddrPort) error {
	s.proxy.mu.Lock()
	defer s.proxy.mu.Unlock()
	s.endpoints = append([]netip.AddrPort(nil), endpoints...)
	return s.proxy.sync()
}

// Addr returns the frontend of the wanted family.
func (s *Service) Addr(is4 bool) netip.AddrPort {
	for _, f := range s.frontends {
		if f.Addr().Is4() == is4 {
			return f
		}
	}
	return netip.AddrPort{}
}

// Hold makes the Proxy lag: from now on changes are remembered but not
// programmed, as by a kube-proxy that is busy, slow or dead.
func (p *Proxy) Hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = true
}

// Release ends a Hold and programs what was remembered.
func (p *Proxy) Release() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = false
	return p.sync()
}

// sync programs the wanted state, unless held.
func (p *Proxy) sync() error {
	if p.held {
		return nil
	}
	families := []nftables.TableFamily{nftables.TableFamilyIPv4}
	if hasIPv6() {
		families = append(families, nftables.TableFamilyIPv6)
	}
	return p.ns.Do(func() error {
		for _, family := range families {
			conn, err := nftables.New()
			if err != nil {
				return fmt.Errorf("connect to nftables: %w", err)
			}
			if err := writeTable(conn, family, p.services); err != nil {
				return err
			}
			if err := conn.Flush(); err != nil {
				return fmt.Errorf("program table %s: %w", proxyTable, err)
			}
		}
		return nil
	})
}
