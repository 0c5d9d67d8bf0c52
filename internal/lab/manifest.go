package lab

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
)

// manifest is the Service and its EndpointSlices as YAML documents: what an
// API server would say.
func (s *Service) manifest(endpoints []netip.AddrPort) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: kube-system}\nspec:\n  clusterIPs:\n", s.name)
	for _, f := range s.frontends {
		fmt.Fprintf(&b, "  - %q\n", f.Addr())
	}
	b.WriteString("  ports:\n  - {name: dns, protocol: UDP, port: 53}\n  - {name: dns-tcp, protocol: TCP, port: 53}\n")
	for _, f := range s.frontends {
		kind := "IPv6"
		if f.Addr().Is4() {
			kind = "IPv4"
		}
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-%[2]s, namespace: kube-system, labels: {kubernetes.io/service-name: %[1]s}}
addressType: %[2]s
ports:
- {name: dns, protocol: UDP, port: 53}
- {name: dns-tcp, protocol: TCP, port: 53}
endpoints:
`, s.name, kind)
		for _, e := range ofFamily(endpoints, f.Addr().Is4()) {
			fmt.Fprintf(&b, "- {addresses: [%q], conditions: {ready: true, serving: true, terminating: false}}\n", e.Addr())
		}
	}
	return b.Bytes()
}

// present returns the Service's endpoints.
func (s *Service) present() []netip.AddrPort {
	s.proxy.mu.Lock()
	defer s.proxy.mu.Unlock()
	return slices.Clone(s.endpoints)
}
