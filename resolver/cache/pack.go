package cache

import (
	"encoding/binary"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// answer is an accepted answer of a shape that can be packed as it is.
type answer struct {
	msg  []byte
	r    *dnswire.Response
	kind dnswire.Kind
	zone Zone
	life time.Duration
	led  int
}

// denial reports whether the answer denies the name or the type.
func (a *answer) denial() bool { return a.kind == dnswire.NoData || a.kind == dnswire.NXDomain }

// pack returns the answer as a blob, and what that takes from the heap.
func (a *answer) pack(key []byte, now time.Duration) (blob string, size int) {
	h := header{
		stored: now, life: a.life, kind: Negative,
		flags: a.r.Flags&storedFlags | a.r.Rcode, nameLen: a.r.NameLen, led: a.led,
	}
	switch a.kind {
	case dnswire.Positive:
		h.kind, h.stale = Positive, a.zone.Stale
	case dnswire.NoData:
		h.stale = a.zone.StaleNoData
	case dnswire.NXDomain:
		h.stale = a.zone.StaleNXDomain
	}
	recs := a.r.Records
	for i := range recs {
		h.counts[recs[i].Section]++
	}
	from := dnswire.HeaderLen + a.r.NameLen + 4
	end := from
	if len(recs) > 0 {
		end = recs[len(recs)-1].End
	}
	var b strings.Builder
	newBlob(&b, &h, key, 2*len(recs)+end-from)
	var p [4]byte
	for i := range recs {
		binary.BigEndian.PutUint16(p[:], uint16(recs[i].TTLOff)) //nolint:gosec // a message has 65,535 octets
		b.Write(p[:2])
	}
	for i := 0; i < len(recs); {
		n := setLen(a.msg, recs[i:])
		binary.BigEndian.PutUint32(p[:], a.ttl(recs[i:i+n]))
		for ; n > 0; n-- {
			b.Write(a.msg[from:recs[i].TTLOff])
			b.Write(p[:])
			from = recs[i].TTLOff + len(p)
			i++
		}
	}
	b.Write(a.msg[from:end])
	return b.String(), b.Cap()
}

// ttl returns the one TTL of an RRset (RFC 2181 section 5.2), capped. A
// denial's SOA record tells those who cache behind us how long it holds (RFC
// 2308 section 3).
func (a *answer) ttl(set []dnswire.Record) uint32 {
	soa := a.denial() && set[0].Type == dnswire.TypeSOA && set[0].Section == dnswire.Authority
	ttl := seconds(a.zone.Positive)
	if soa {
		ttl = seconds(a.zone.Negative)
	}
	for i := range set {
		ttl = min(ttl, set[i].TTL(a.msg))
		if soa {
			ttl = min(ttl, binary.BigEndian.Uint32(a.msg[set[i].End-4:]))
		}
	}
	return ttl
}

func seconds(d time.Duration) uint32 { return uint32(d / time.Second) } //nolint:gosec // at most maxPeriod

// setLen returns how many of the records, from the first on, are of one RRset.
func setLen(msg []byte, recs []dnswire.Record) int {
	for i := 1; i < len(recs); i++ {
		if !sameSet(msg, &recs[0], &recs[i]) {
			return i
		}
	}
	return len(recs)
}

// sameSet reports whether two records are of one RRset. RRSIG records are told
// apart by the type that they cover (RFC 4034 section 3).
func sameSet(msg []byte, a, b *dnswire.Record) bool {
	return a.Section == b.Section && a.Type == b.Type && a.Class == b.Class &&
		covered(msg, a) == covered(msg, b) && dnswire.NameEqual(msg, a.Off, b.Off)
}

// covered returns the type that an RRSIG record covers, and 0 for others.
func covered(msg []byte, rec *dnswire.Record) uint16 {
	if rec.Type != dnswire.TypeRRSIG || rec.End-rec.DataOff < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(msg[rec.DataOff:])
}
