package cache

import (
	"encoding/binary"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Kind is what a look-up found.
type Kind uint8

// The kinds. A Stale entry is only found while a failure is active for its
// key; of Failed, the cause is had from Cache.Failure.
const (
	Miss     Kind = iota
	Positive      // a fresh answer with data
	Negative      // a fresh NXDOMAIN or NODATA
	Stale         // an expired answer, to be sent with ReplyOptions.Stale
	Failed        // the question failed a moment ago (RFC 9520)
)

// String returns the kind's name as it stands in metrics.
func (k Kind) String() string {
	switch k {
	case Positive:
		return "positive"
	case Negative:
		return "negative"
	case Stale:
		return "stale"
	case Failed:
		return "failure"
	default:
		return "miss"
	}
}

// Entry is an answer, ready to be sent to whoever asks its question. It is
// immutable and stays valid after the cache has dropped it. The zero Entry
// answers SERVFAIL.
type Entry struct {
	blob string
	hit  bool // it had been hit before the look-up that returned it
}

// A blob is a header, the key, the offset of each record's TTL from the
// message's first octet (the counts tell how many), and the body: the records.
// A failure's body is its EDE code and text instead.
const (
	blobStored  = 0  // int64: nanoseconds since the cache was made
	blobLife    = 8  // uint32: milliseconds from then to expiry
	blobStale   = 12 // uint32: milliseconds from expiry to the end of the stale window
	blobFlags   = 16 // uint16: AA and AD as they came, and the rcode
	blobCounts  = 18 // 3 uint16: answer, authority, additional
	blobKeyLen  = 24 // uint16
	blobNameLen = 26 // uint8: length of the qname in octets, with the root
	blobKind    = 27 // uint8
	blobHeader  = 28
)

// storedFlags are the bits of an answer's flags that are its own, and not the
// hop's.
const (
	storedFlags        = dnswire.FlagAA | dnswire.FlagAD
	rcodeMask   uint16 = 0xf // RFC 1035 section 4.1.1
)

// blobKind has a Kind in its lower bits, and what StoreLed was told above.
const (
	kindBits = 3
	maxLed   = 1<<(8-kindBits) - 1
)

// header is a blob's header before it is packed.
type header struct {
	stored      time.Duration
	life, stale time.Duration
	flags       uint16
	counts      [3]uint16
	nameLen     int
	kind        Kind
	led         int
}

// newBlob returns a builder that holds header and key and has room for n more
// octets. Its Cap is what the blob takes from the heap.
func newBlob(b *strings.Builder, h *header, key []byte, n int) {
	b.Grow(blobHeader + len(key) + n)
	var p [blobHeader]byte
	binary.BigEndian.PutUint64(p[blobStored:], uint64(h.stored)) //nolint:gosec // read back as int64
	binary.BigEndian.PutUint32(p[blobLife:], millis(h.life))
	binary.BigEndian.PutUint32(p[blobStale:], millis(h.stale))
	binary.BigEndian.PutUint16(p[blobFlags:], h.flags)
	for i, count := range h.counts {
		binary.BigEndian.PutUint16(p[blobCounts+2*i:], count)
	}
	binary.BigEndian.PutUint16(p[blobKeyLen:], uint16(len(key)))    //nolint:gosec // bounded by Store
	p[blobNameLen] = byte(h.nameLen)                                //nolint:gosec // dnswire.MaxNameLen is 255
	p[blobKind] = byte(h.kind) | byte(min(h.led, maxLed))<<kindBits //nolint:gosec // see maxLed
	b.Write(p[:])
	b.Write(key)
}

// millis returns d, which is at most maxPeriod, in whole milliseconds.
func millis(d time.Duration) uint32 { return uint32(d / time.Millisecond) } //nolint:gosec // see above

// Like encoding/binary's, one load each.

func be16(s string, i int) uint16 {
	s = s[i : i+2]
	return uint16(s[1]) | uint16(s[0])<<8
}

func be32(s string, i int) uint32 {
	s = s[i : i+4]
	return uint32(s[3]) | uint32(s[2])<<8 | uint32(s[1])<<16 | uint32(s[0])<<24
}

func be64(s string, i int) uint64 {
	s = s[i : i+8]
	return uint64(s[7]) | uint64(s[6])<<8 | uint64(s[5])<<16 | uint64(s[4])<<24 |
		uint64(s[3])<<32 | uint64(s[2])<<40 | uint64(s[1])<<48 | uint64(s[0])<<56
}

func (e Entry) stored() time.Duration {
	return time.Duration(be64(e.blob, blobStored)) //nolint:gosec // written by newBlob
}

func (e Entry) life() time.Duration {
	return time.Duration(be32(e.blob, blobLife)) * time.Millisecond
}

func (e Entry) expires() time.Duration { return e.stored() + e.life() }

func (e Entry) staleUntil() time.Duration {
	return e.expires() + time.Duration(be32(e.blob, blobStale))*time.Millisecond
}

func (e Entry) flags() uint16 { return be16(e.blob, blobFlags) }

// count returns the number of records in a section.
func (e Entry) count(s dnswire.Section) uint16 { return be16(e.blob, blobCounts+2*int(s)) }

func (e Entry) records() int {
	return int(e.count(dnswire.Answer)) + int(e.count(dnswire.Authority)) + int(e.count(dnswire.Additional))
}

func (e Entry) keyEnd() int { return blobHeader + int(be16(e.blob, blobKeyLen)) }

func (e Entry) key() string { return e.blob[blobHeader:e.keyEnd()] }

// ttlOff returns the offset of the i-th record's TTL in a message.
func (e Entry) ttlOff(i int) int { return int(be16(e.blob, e.keyEnd()+2*i)) }

func (e Entry) body() string { return e.blob[e.keyEnd()+2*e.records():] }

// Kind returns Positive or Negative, whether the answer is fresh or not; Miss
// of the zero Entry.
func (e Entry) Kind() Kind {
	if e.blob == "" {
		return Miss
	}
	return Kind(e.blob[blobKind] & (1<<kindBits - 1))
}

// Rcode returns the answer's response code; SERVFAIL of the zero Entry.
func (e Entry) Rcode() uint16 {
	if e.blob == "" {
		return dnswire.RcodeServFail
	}
	return e.flags() & rcodeMask
}

// Len returns the length in octets of the whole reply to a query without EDNS.
func (e Entry) Len() int {
	if e.blob == "" {
		return 0
	}
	return dnswire.HeaderLen + int(e.blob[blobNameLen]) + 4 + len(e.body())
}

// Led returns how many questions the answer spares its client, if it was stored
// with StoreLed (31 stands for more); else 0.
func (e Entry) Led() int {
	if e.blob == "" {
		return 0
	}
	return int(e.blob[blobKind] >> kindBits)
}

// TTL returns how long the answer still holds; nothing or less if it has
// expired or was never to be kept.
func (e Entry) TTL(now time.Duration) time.Duration {
	if e.blob == "" {
		return 0
	}
	return e.expires() - now
}

// minPrefetch is the shortest life that is worth renewing early. Below, the
// last tenth is under a second, and an upstream that caches itself would
// answer with the remainder of the very same TTL.
const minPrefetch = 10 * time.Second

// PrefetchDue reports whether the answer should be renewed before it expires:
// it is positive and in the last tenth of its life, and the hit that returned
// it was not the first.
func (e Entry) PrefetchDue(now time.Duration) bool {
	left := e.TTL(now)
	return e.hit && e.Kind() == Positive && e.life() >= minPrefetch && left > 0 && left <= e.life()/10
}
