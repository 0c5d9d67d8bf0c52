// Package cache keeps packed DNS answers under one byte budget and is the one
// encoder of replies, for hits and misses alike.
//
//	               Lookup ──► Entry ─────┐
//	AppendKey ──►  Stale                 ├──► Entry.AppendReply ──► datagram
//	               Store (a miss) ► Entry┘
//	               StoreFailure, Failure
//
// # Entries
//
// Store turns a validated answer into one immutable string: a small header
// (when it was stored, for how long it holds, flags, counts), the key, the
// offsets of the TTLs, and the records as they were packed. The key contains
// the question, so it is not kept twice; OPT is never kept (RFC 6891 section
// 6.2.1). AppendReply is then one copy: the query's own id and
// question bytes, the records, the TTLs aged in place. Owner names that equal
// the qname are pointers to octet 12, so that they follow the case in which
// the client asked. Answers that come in another shape take a slow path once,
// through github.com/miekg/dns.
//
// # Which answer is current
//
// There is one current answer per key. A newer answer replaces the older one,
// whatever either says; an answer that must not be kept still ends the life of
// what it contradicts (Store tells the cases). Failures (RFC 9520) live in a
// table of their own: they can neither hide nor replace an answer. Lookup goes
// by this order:
//
//	fresh answer                                       Positive, Negative
//	failure active, expired answer in its stale window Stale
//	failure active                                     Failed
//	else                                               Miss
//
// # Time to live
//
// Instants are time.Durations since the cache was made (Now): monotonic, so no
// clock jump ages or revives an entry. Every record keeps its own TTL, but for
// RRsets, which have one (RFC 2181 section 5.2). An answer holds for the least
// of its TTLs, a negative one for no longer than min(SOA TTL, SOA MINIMUM) (RFC
// 2308 section 5); the zone of the qname caps both. TTL 0 is honoured: the
// clients that wait are answered, nothing is kept. There is no floor.
//
// # Stale
//
// An expired entry stays until its zone's stale window ends or its room is
// needed (RFC 8767). Zone.Stale is the window of positive answers. Denials have
// their own, 0 unless set, because what they do is not the same:
//
//   - A stale NXDOMAIN is wrong for names that are about to exist: a
//     StatefulSet's pod, a Service's first endpoint. Clients take it as final,
//     where they would try again after SERVFAIL. Not for the cluster zone;
//     for names outside, RFC 8767 section 4 allows it, and during an outage it
//     lets a search list's walk go on to the name that is meant.
//   - A stale NODATA says that a name still has no address of one family. musl
//     fails the whole look-up if the AAAA question fails, however good the A
//     answer is.
//
// A positive answer is never revived after a denial: the denial has replaced
// it.
//
// # Memory
//
// Config.Size counts everything that grows: each blob by the allocator's size
// class, its node, the hash tables. The budget is global; shards only spread
// the lock, and none evicts while the whole is below the limit. Positive
// answers begin in the probation segment and move, with their second use, into
// the protected one (three fifths of the size at most: four fifths of what
// denials cannot take), so that random names, each asked once, only ever wash
// out each other. Denials have a quarter of the size at most, failures a
// thirty-second.
//
// # Invariants
//
//   - Lookup, Stale, Failure, Peek and AppendReply do not allocate, and
//     AppendReply copies no more than the reply has.
//   - A part of an RRset is only ever sent with TC, in the answer section, and
//     to clients that do not validate.
//   - The whole key decides, never its hash alone; the hash is seeded per
//     process.
//   - What is never kept: truncated answers, failures, denials without an SOA
//     that covers the name, answers to another question.
//   - A shard's lock is held for one look-up or one change; no two are ever
//     held at once; nothing is called back under one.
//   - No goroutines, no timers.
//
// RFC 1035, 2181 (RRsets, TTLs, truncation), 2308 (negative answers), 4343
// (case), 6840 (AD), 6891 (EDNS), 8767 (stale), 8914 (extended errors), 9520
// (failures).
package cache
