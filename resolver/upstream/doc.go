// Package upstream forwards questions to upstream DNS servers.
//
// Its one job is to get the right answer to one question in time, at the least
// cost for the servers: which server, over which transport and socket, when to
// ask again and when not.
//
//	Exchange --route--> exchange --attempt--> server --pick--> conn --socket-->
//	                       ^                                    |
//	                       +------- event: answer, failure -----+ reader
//
// A route's gate spreads bursts, which would overflow a server's socket. An
// exchange is one question; it runs in its caller's goroutine, with one timer and
// one channel. It makes attempts: the first, a hedge (after about three
// smoothed round trips), a retry (700 ms), and what answers and failures ask
// for: TCP after TC, no OPT after FORMERR, the next server after SERVFAIL, a new
// socket after an ICMP error. A conn is one socket, UDP or TCP, with its own
// random ids and a goroutine that reads it for all exchanges. A server is one
// address: two pools of conns and what is known of each path (server and
// transport), all under one lock.
//
// # Invariants
//
//   - Only the right answer ends a wait: from the connected socket's server,
//     with the id and the question of the query, well-formed (RFC 5452 section
//     9.1). Anything else is counted, and the wait goes on.
//   - An answer with TC set never leaves the package. Neither does one to
//     another question.
//   - An ICMP error fails the question that it quotes (RFC 5927 section 4).
//   - An exchange ends within Timeouts.Total.
//   - A question costs a server one query. Second ones (hedges, retries) come
//     out of the route's budget, which fills by questions; none is sent on a path
//     where most questions come so far that one would be due. Not charged is what
//     no server can have received (sent to a refusing socket, a dead server, a
//     flow that RetireSockets ended), the first question to the next server, what
//     the answer itself asks for (TCP, no OPT), and a probe every few seconds of
//     a path that is down.
//   - A path goes down only when a question that is known to be answerable has
//     gone unanswered too. What this machine's kernel refuses (to send, to open)
//     is never held against a server.
//   - A denial is not returned while a server before the one that gave it is up
//     and has yet to answer.
//   - A second query never uses a socket that others wait on: behind a
//     ClusterIP a new 5-tuple is a new throw of kube-proxy's dice. New sockets
//     get one question until they have answered; silent ones get no more.
//   - A UDP socket takes questions for less than 2 s: the flow stays a 30 s entry
//     of the connection tracker.
//   - Every goroutine belongs to the Forwarder; Close waits for all of them.
//
// # Choices
//
// Servers are asked in the order of the configuration, not by speed: resolv.conf
// means it so, and a list may well mix an internal resolver and a public one. A
// server, or one transport of it, that leaves questions unanswered, and those of
// a confirmation as well (confirm.go), is passed over, and tried again on what it
// has answered before and on copies of real questions, for which nobody waits.
// What a later server denies does not count while an earlier one is alive
// (order.go).
//
// Queries have RD and AD (a validating server then tells, RFC 6840 section 5.7),
// CD and DO as asked, an OPT record with 1232 octets (RFC 9715), and no other
// option: no client subnet, no cookie. Servers that choke on OPT records are
// spared them for a quarter of an hour.
//
// Sources: RFC 1035 section 4.2 (transports), RFC 4343 (case), RFC 5452 (forged
// answers), RFC 6298 (smoothed round trips), RFC 6891 section 7 (servers without
// EDNS), RFC 7766 (TCP reuse, pipelining, order), RFC 8914 (extended errors),
// RFC 9520 (resolution failures); kernel, nf_conntrack_proto_udp.c (timeouts).
package upstream
