// Package kubelab runs a Kubernetes cluster on one machine without a container
// engine: the real etcd, kube-apiserver, kube-controller-manager, kube-proxy and
// CoreDNS, as processes in network namespaces that this process makes. What
// kubelet does is done here: pods are namespaces, their objects' status is
// patched, and their end is played in kubelet's steps.
//
//	control ............ etcd, kube-apiserver 172.30.0.2:6443,
//	   |                 kube-controller-manager (EndpointSlices, DaemonSets)
//	   |
//	 wire 172.30.0.1 -- internet 203.0.113.53: a DNS server for example.com
//	   |        \        (internal/lab)
//	   |         \
//	 node 1       node 2        172.30.0.N .... kube-proxy, conntrack, dnsguard
//	   | 10.244.N.1                              CoreDNS asks the API by way of
//	   |                                         10.96.0.1, as everywhere
//	 pods 10.244.N.2 ... CoreDNS on both nodes; clients
//
// Everything has IPv6 twins: fd00:172:30::N, fd00:10:244:N::/64,
// fd00:10:96::/112, with kube-dns at 10.96.0.10 and fd00:10:96::a. The wire knows
// where each node's pods are, as a cloud's routes do, and lets what comes back
// from a pod's own node vanish: the address of a dead pod is silent.
//
// # Invariants
//
//   - Nothing outlives this process, even after kill -9: processes carry a death
//     signal, their files are on a tmpfs of their own mount namespace, and
//     namespaces, links and rules go with the last process in them.
//   - The machine's own namespace is never changed, and nothing here can be
//     reached from it: the API server is spoken to through sockets made inside.
//   - What has to come is looked for; nothing waits for a time to pass.
//   - The cluster authorizes with RBAC; who needs no less than everything (the
//     controllers, CoreDNS) is in system:masters.
package kubelab
