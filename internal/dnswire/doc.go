// Package dnswire reads DNS queries and answers where they lie and patches
// packed answers, without allocating and without building message values.
//
// Its one job is the part of DNS that every packet pays for: decide whether a
// datagram is a query worth answering (ParseQuery), whether a datagram from an
// upstream is a well-formed answer and what it means (ParseResponse,
// Response.Classify), and lay out the few bytes that differ between two
// answers to the same question. Whole messages, exotic record types and
// presentation format belong to github.com/miekg/dns.
//
//	datagram --ParseQuery--> Query (offsets, flags)            verdict
//	datagram --ParseResponse--> Response (records' offsets) --Classify--> Summary
//	Query --AppendQuery / AppendError / AppendOPT--> bytes
//
// Invariants:
//   - The parsers take any octets, and the other functions whatever the parsers
//     accepted, without reading past the end, panicking or looping. The work
//     for one message is linear in its size: a compression pointer must point
//     strictly backwards, and a name has at most 255 octets and 126 pointers.
//   - What ParseQuery and ParseResponse accept, miekg/dns decodes to the same
//     values (fuzzed). Exempt is what a query's reader must ignore, and of a
//     truncated answer what was not read. Answers with RDATA or EDNS options
//     that are not checked here are flagged (Response.Unchecked), so that a
//     caller can have them checked.
//   - Of an accepted answer, any number of whole records from the front is
//     acceptable, too: no name that is checked needs octets behind its record.
//   - Names travel between packages as folded wire-form names: lower case,
//     uncompressed, root octet included (RFC 1035 section 3.1, RFC 4343).
//   - The package imports nothing but the standard library.
//
// Sources: RFC 1035 (format), RFC 2181 (RRsets, truncation), RFC 2308
// (negative answers), RFC 4343 (case), RFC 6891 (EDNS), RFC 7828 (TCP
// keepalive), RFC 7873 (cookies), RFC 8914 (extended errors), RFC 9619
// (QDCOUNT).
package dnswire
