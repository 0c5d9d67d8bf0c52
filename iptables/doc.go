// Package iptables makes pods' DNS queries reach this node's resolver without
// a change to the pods, in such a way that they reach kube-dns by themselves
// the moment the resolver does not answer.
//
// # What happens to a packet
//
// The resolver's sockets are transparent (Listen): they are bound to addresses
// that no interface has, a link-local one or kube-dns's ClusterIP. A query to
// such an address meets, before connection tracking:
//
//	prerouting, raw     a live transparent socket is bound to the destination,
//	  (output: a local  an answer has left it lately (@alive), the client is
//	  client's query)   neither excluded nor bypassed
//	                      -> counted per client (@taken), untracked, marked
//	routing rule        mark -> our table -> "local ADDRESS dev lo" -> socket
//	output, raw         the answer: untracked; renews @alive
//
// Everything else passes as if we were not there: to a ClusterIP by
// kube-proxy's rules; to a link-local address by the fallback, a table that
// outlives the process and rewrites, without state, to the ClusterIP and back.
// The resolver's own queries carry the other mark bit (MarkUpstream) and are
// not taken.
//
// What the kernel is told is data (RuleSet), the same for every backend, with a
// text form. The backends are nftables over netlink, and iptables-restore for
// kernels without it, which can do less (see xtKernel).
//
// # Why it cannot outlive the process
//
// Several releases, each the kernel's and independent of the others:
//
//   - Death: the table belongs to a netlink socket and goes with it (flag
//     owner); and no packet is taken for which no socket is open.
//   - Hang: @alive holds (address, protocol, port) for AliveTimeout and only an
//     answer that leaves renews it; a probe over the same way asks for one when
//     there is no traffic (pulse). No transaction is needed, so a long commit
//     of kube-proxy delays nothing.
//   - One client that cannot reach us: what the kernel took from it is compared
//     with what arrived (ledger); @bypass lets it past for minutes.
//   - Withdraw takes single services out, for example one family.
//
// The heartbeats of single readers are the resolver's; it closes what stands
// still, and the kernel passes over closed sockets.
//
// # Keeping it
//
// Run compares on every netlink notification and twice a second, and repairs:
// one transaction asserts a whole table, whatever is there (never "is it
// there? then insert"). Routing rules and routes are added exclusively: the
// kernel refuses a second one.
//
// Processes may overlap in an upgrade. Each takes a slot (see slot), which
// names its table; the newest keeps what they share. Sockets.Steer gives the
// newcomer everything. Start adopts or removes what dead processes left,
// Cleanup removes everything.
//
// Apart from all that, Accounting has the kernel count the packets of tracked
// flows, for who judges flows by them.
//
// The order matters. Start: Listen, then Start (sockets before rules), then the
// first answer (rules before @alive). End: Withdraw, drain and close the
// sockets, then Close: an answer that leaves without the rules would be tracked,
// as the start of a flow in which the client is the one who answers.
//
// # Minimum kernels
//
//	nftables backend     5.2 (chains of type route in family inet; socket 4.18)
//	  look-ups count     5.7; before, clients are put into @taken each time
//	  flag owner         5.12; before, the rules stay but match nothing
//	iptables backend     3.11 (xt_socket --nowildcard), xt_recent, CT --notrack
//	routing              4.17 (protocol of routing rules)
//	sockets              3.9 (SO_REUSEPORT); Steer 4.6, without loss 5.4
//
//	Accounting           4.8
//
// Probes at run time decide; the numbers only tell what to expect, except for
// look-ups that count, which only a packet could tell. docs/OPERATIONS.md has
// where each number is from.
//
// The package knows nothing of DNS but that a query has an answer with its id,
// and nothing of Kubernetes. It logs nothing and owns no metrics: OnEvent and
// Stats have what a daemon tells. Sources: the kernel's net/netfilter,
// net/core/sock_reuseport.c and net/core/fib_rules.c; nft(8), ip-rule(8),
// iptables-extensions(8), netlink(7), ip(7), udp(7).
package iptables
