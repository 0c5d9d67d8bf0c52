package ctguard

import "net/netip"

// Snapshot is the whole of what the cluster says about the watched Services
// at one moment. It is plain data, and immutable once it has been handed to
// [Guard.Update] or [NewPolicy].
//
// Whoever builds it (from the API server, or from files) leaves out what it
// cannot know yet: a Service that is missing here after it had been present
// is a deleted Service, and its flows are condemned. So there is no snapshot
// before every informer has synced, and a guard that is to watch other Services
// is a new guard.
type Snapshot struct {
	Services []Service

	// NodeAddrs are the node's own addresses, of both families, on which the
	// node ports of the Services are reached.
	NodeAddrs []netip.Addr
}

// Service is one watched Service.
type Service struct {
	// Name is "namespace/name". It is shown to people and decides nothing.
	Name string

	// Addrs are the addresses under which the Service is reached at its own
	// ports: cluster IPs of both families, external IPs, load balancer
	// ingress IPs.
	Addrs []netip.Addr

	// Ports are the Service's UDP ports. Others must be left out.
	Ports []Port
}

// Port is one UDP port of a Service.
type Port struct {
	// Name is the port's name: the only link between a Service and the
	// target ports of its EndpointSlices, which may differ from pod to pod.
	Name string

	// Port is the Service's own port, at each of its addresses.
	Port uint16

	// NodePort is the port at each of the node's addresses, or 0.
	NodePort uint16

	// Endpoints are all endpoints of the EndpointSlice ports of this name,
	// of both families, serving or not. The same address may occur in
	// several slices.
	Endpoints []Endpoint
}

// Endpoint is one endpoint of one port.
type Endpoint struct {
	// Addr is the pod's address with the target port (not the Service's).
	Addr netip.AddrPort

	Serving     bool
	Terminating bool
}

// NewEndpoint resolves the conditions of an EndpointSlice, where each may be
// absent: an endpoint without the serving condition serves, one without the
// terminating condition does not terminate (as in kube-proxy). The ready
// condition has no part in this: an endpoint that takes no new flows may still
// answer those that it has. One that is ready without serving takes new flows, and
// whoever builds the snapshot says of it that it serves and terminates.
func NewEndpoint(addr netip.AddrPort, serving, terminating *bool) Endpoint {
	return Endpoint{
		Addr:        addr,
		Serving:     serving == nil || *serving,
		Terminating: terminating != nil && *terminating,
	}
}
