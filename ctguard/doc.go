// Package ctguard keeps a node's connection tracking table free of UDP flows
// that lead to endpoints which no longer serve.
//
// The kernel translates the destination of a UDP flow once, with its first
// packet, and then by the flow's entry in the connection tracking table: for
// as long as packets come, whatever has become of the endpoint since. A
// client that keeps its source port, as Envoy and glibc's retries do, is
// therefore bound to a dead DNS server until somebody deletes the entry. Then
// its next packet is translated by the rules of the day.
//
// # Data flow
//
//	Snapshot --> Guard.Update --> knowledge --> Policy      (pure; immutable)
//	                                              |
//	Table.Flows --(kernel's filter)--> Flow --> Decide --> Stale --> Table.Delete
//	Events -------(kernel's filter)--> Flow ------^             `--> OnPurge, Stats
//	known flows --(at the news)----------> Decide --> Table.Delete
//	Prober --> endpoints that have fallen silent, and silent
//	           ones that are not known --> knowledge
//
// [Policy.Decide] has the rule, and depends on nothing but its arguments.
// [Guard] applies it to the whole table again and again, at 0, 1, 3, 10 and
// 30 s after each change and every 30 s, since no single event can be trusted
// to come, or to come in time: and to each new flow in between, since
// kube-proxy changes its rules later than the guard hears the news. (An address
// family to which no flow leads is read less often while events tell of none.) The flows
// that it has seen last, in sweeps, and the newest of those that events told
// of, at most 4,096 of each (1.4 MB), are remembered: the news delete them at
// once, and not when the kernel has walked over its table. [Kernel]
// is the table, over ctnetlink; package ctguardtest has one in memory.
//
// # Invariants
//
//   - A flow to an endpoint that serves and stays is never deleted. (The one
//     exception has to be asked for, with Config.Evidence: an endpoint that has
//     answered probes and does not now, while another does.)
//   - Nothing is judged before the first snapshot.
//   - An endpoint is gone at once only if some snapshot has said that it serves, or
//     has had it before it left. With a Prober, others are probed, and their flows
//     deleted only if they are silent: the news may lag behind kube-proxy's.
//   - A flow is deleted by its reply tuple, which names the endpoint. A flow
//     that the same client has made to another endpoint in the meantime has
//     another reply tuple, and is out of reach. (The entry's id would not do:
//     the kernel gives it to the next entry at once.)
//   - A message that deletes by a filter names frontend and endpoint, and is
//     sent only if every flow between the two is stale.
//   - A query in hand is not lost: a flow to an endpoint that terminates and
//     still answers is deleted only when it has been idle.
//   - What a sweep costs does not depend on foreign flows, but for the kernel's
//     own walk over its hash table (Linux 5.8; about a quarter of a microsecond
//     for each entry, and each family that has flows), and memory not even on older
//     kernels.
//
// # What the kernel does not do
//
// CTA_FILTER compares IPv6 addresses the wrong way round: an address that is
// equal does not match, and every other does (seen on Linux 6.18). So filters
// carry IPv6 ports only, the rest is sorted out here, and no IPv6 flow is ever
// deleted by a filter: it would spare the stale flows and hit the living ones.
//
// The library does not log and has no metrics of its own: see [Stats],
// [Config].OnPurge and [Config].OnState.
//
// Sources: net/netfilter/nf_conntrack_netlink.c, nf_conntrack_proto_udp.c and
// include/uapi/linux/netfilter/nfnetlink_conntrack.h of Linux; for the rule,
// pkg/proxy/conntrack of Kubernetes, from which it differs for endpoints that
// terminate.
package ctguard
