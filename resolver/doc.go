// Package resolver is the query path of dnsguard: it takes ready sockets and
// answers the DNS queries that come in on them, from a cache or through a
// forwarder.
//
//	UDP: socket --recvmmsg--> ParseQuery --> cache.Lookup --hit--> AppendReply --> sendmmsg
//	TCP: conn --frames------> ParseQuery --> cache.Lookup --hit--> AppendReply --> out buffer
//	                                              |
//	                                              |miss, prefetch
//	                                              v
//	          admission --> flight (one per question) --> Forwarder.Exchange --> cache.Store
//	                             |                                                   |
//	                             +--- waiters: UDP peers and TCP conns <--AppendReply-+
//
// A hit is answered by the goroutine that read it, without an allocation, a
// goroutine or a message library; the clock is read twice a batch. A miss joins
// the flight of its question or starts one, if admission allows; the flight's
// goroutine asks the forwarder once and answers every waiter through the same
// encoder that serves hits.
//
// Owners: a UDP socket has one reader goroutine; a TCP connection has one
// reader, and a writer while there is something to write; a flight has one
// goroutine. Shutdown and Remove end all of them, answering first what the
// kernel had already taken in.
//
// Invariants:
//   - Every query gets at most one answer, and one that was accepted gets
//     exactly one, within the forwarder's total deadline.
//   - What is held for clients is bounded: flights and waiters by number, TCP
//     output by octets, connections by number in total and per client.
//   - Overload is a stale answer or SERVFAIL with an extended error, never
//     REFUSED: musl treats REFUSED as no answer and stalls (it waits out its
//     5 s timeout).
//   - The package does not know why a socket is special (transparent, marked),
//     nor Kubernetes, nor configuration files. It logs nothing and owns no
//     metrics: Stats has what a daemon publishes.
//
// Sources: RFC 1035 (transport), RFC 2308, RFC 7766 and RFC 9210 (TCP), RFC
// 7828 (TCP keepalive), RFC 8482 (ANY), RFC 8767 (stale answers), RFC 8914
// (extended errors), RFC 9520 (failures); recvmmsg(2), socket(7), udp(7).
package resolver
