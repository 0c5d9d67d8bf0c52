// Package search knows how clients' libcs walk their search lists, so that the
// node can finish a walk in one step.
//
// A client with the list ns.svc.cluster.local, svc.cluster.local,
// cluster.local, example.net and ndots 5 that wants api.example.com asks up to
// five names, each for A and AAAA:
//
//	api.example.com.ns.svc.cluster.local   <- the first is all that the node needs to see
//	api.example.com.svc.cluster.local
//	api.example.com.cluster.local
//	api.example.com.example.net
//	api.example.com
//
// The package is pure: from what is known of a client (Pod) or can be read off
// a qname it makes a List; from a List and a qname it plans a Walk (the names
// in the client's order); and Decide says, from the states of one name, how
// the walk goes on. Asking is the caller's.
//
//	Pod --Policy.ListOf--> List --Policy.Collapse--> Walk --Candidate(i)--> names
//	qname --Policy.Infer--> List --Policy.Expand---> Walk      states --Decide--> Step
//
// Invariants:
//   - A walk is finished for the client only as far as glibc and musl agree on
//     what comes next. Where they do not (a name that exists without
//     addresses: glibc goes on, musl stops), the answer is the one to the
//     client's own question, and each goes on in its own way.
//   - The decision is one per name, never per type: NXDOMAIN for one type is
//     NXDOMAIN (RFC 8020 section 2), and a name that has addresses of one
//     family has none of the other, rather than those of another name.
//   - A failure stops a walk: to go on past it would name another host. Only
//     where the other family has shown that the name does not exist is there
//     nothing to go past.
//   - A list is what kubelet writes, octet by octet: duplicates as spelled, 32
//     domains, none over 253 characters, 2,048 in all. Where libcs differ on what
//     they read (a domain that is none, the root before others, a negative
//     ndots), there is no list.
//   - Nothing here allocates per query.
//
// Sources: resolv.conf(5) of glibc; musl src/network/lookup_name.c; kubelet's
// pkg/kubelet/network/dns (v1.37); RFC 8020.
package search
