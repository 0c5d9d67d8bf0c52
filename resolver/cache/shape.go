package cache

import (
	"bytes"
	"fmt"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// maxSets is up to how many RRsets are compared with each other before an
// answer is grouped by a map instead, in repack: an answer of 64 KiB can have
// thousands. A signed referral from the root has 28.
const maxSets = 64

// plain reports whether an accepted answer can be kept octet by octet, but for
// its TTLs and an OPT record at its end: its RRsets hang together (AppendReply
// cuts between them), its owner names that equal the qname are pointers to
// octet 12 (they follow the client's case), and no name runs through a TTL
// (which changes).
func plain(msg []byte, r *dnswire.Response, name []byte) bool {
	return (!r.EDNS || r.OPTLast) && grouped(msg, r.Records) && pointed(msg, r, name)
}

// grouped reports whether the records of each RRset follow each other.
func grouped(msg []byte, recs []dnswire.Record) bool {
	var sets [maxSets]*dnswire.Record
	n := 0
	for i := 0; i < len(recs); i += setLen(msg, recs[i:]) {
		for _, set := range sets[:n] {
			if sameSet(msg, set, &recs[i]) {
				return false
			}
		}
		if n == maxSets {
			return false
		}
		sets[n] = &recs[i]
		n++
	}
	return true
}

// pointed reports whether every name that ParseResponse knows of is spelled out
// or continues at a label of one that is, and whether owner names that equal
// the qname point to it.
func pointed(msg []byte, r *dnswire.Response, name []byte) bool {
	var seen labels
	seen.walk(msg, dnswire.HeaderLen)
	var buf [dnswire.MaxNameLen + 1]byte
	for i := range r.Records {
		rec := &r.Records[i]
		if seen.walk(msg, rec.Off) < 0 {
			return false
		}
		isQname := msg[rec.Off] == 0xc0 && msg[rec.Off+1] == dnswire.HeaderLen
		if !isQname && len(name) > 1 && bytes.Equal(dnswire.AppendName(buf[:0], msg, rec.Off), name) {
			return false
		}
		off, n := rdataNames(rec)
		for ; n > 0; n-- {
			if off = seen.walk(msg, off); off < 0 {
				return false
			}
		}
	}
	return true
}

// labels is the set of offsets at which a label of a spelled-out name begins,
// as far as pointers reach (RFC 1035 section 4.1.4: 14 bits).
type labels [1 << 14 / 64]uint64

// walk adds the labels of the accepted name at off. It returns the offset past
// the name, or -1 if the name ends in a pointer to anything but a label in the
// set.
func (l *labels) walk(msg []byte, off int) int {
	for {
		c := int(msg[off])
		if c >= 0xc0 {
			to := (c&0x3f)<<8 | int(msg[off+1])
			if l[to/64]>>(to%64)&1 == 0 {
				return -1
			}
			return off + 2
		}
		if off/64 < len(l) {
			l[off/64] |= 1 << (off % 64)
		}
		off += 1 + c
		if c == 0 {
			return off
		}
	}
}

// rdataNames returns where the RDATA's names begin and how many they are, for
// the types whose names may be compressed (RFC 3597 section 4), as well as SRV
// and DNAME, which some compress.
func rdataNames(rec *dnswire.Record) (off, n int) {
	switch rec.Type {
	case dnswire.TypeNS, dnswire.TypeCNAME, dnswire.TypePTR, dnswire.TypeDNAME,
		dnswire.TypeMB, dnswire.TypeMD, dnswire.TypeMF, dnswire.TypeMG, dnswire.TypeMR:
		return rec.DataOff, 1
	case dnswire.TypeSOA:
		return rec.DataOff, 2
	case dnswire.TypeMX:
		return rec.DataOff + 2, 1
	case dnswire.TypeSRV:
		return rec.DataOff + 6, 1
	default:
		return 0, 0
	}
}

// repack returns an accepted answer, without OPT, in the shape that plain asks
// for. It is the slow path, for answers that come uncompressed, out of order or
// odd.
func repack(msg []byte, r *dnswire.Response) ([]byte, *dnswire.Response, error) {
	var m dns.Msg
	if err := m.Unpack(msg[:r.End]); err != nil {
		return nil, nil, fmt.Errorf("unpack answer: %w", err)
	}
	qname := m.Question[0].Name
	for _, section := range []*[]dns.RR{&m.Answer, &m.Ns, &m.Extra} {
		*section = groupSets(*section, qname)
	}
	m.Rcode &= int(rcodeMask) // without OPT there is no room for more
	m.Compress = true
	packed, err := m.Pack()
	if err != nil {
		return nil, nil, fmt.Errorf("pack answer: %w", err)
	}
	if len(packed) > dnswire.MaxMsgLen { // names that may not be compressed were
		return nil, nil, fmt.Errorf("pack answer: %d octets", len(packed))
	}
	p := new(dnswire.Response)
	if err := dnswire.ParseResponse(packed, p); err != nil {
		return nil, nil, fmt.Errorf("parse packed answer: %w", err)
	}
	return packed, p, nil
}

// set names an RRset within a section.
type set struct {
	name                string
	typ, class, covered uint16
}

// groupSets returns the records without OPT, those of an RRset one after the
// other, in the order in which the RRsets begin. Owner names that equal qname
// but for case become qname, so that they are packed as pointers to it.
func groupSets(rrs []dns.RR, qname string) []dns.RR {
	folded := dns.CanonicalName(qname)
	at := make(map[set]int, len(rrs))
	var sets [][]dns.RR
	for _, rr := range rrs {
		h := rr.Header()
		if h.Rrtype == dns.TypeOPT {
			continue
		}
		s := set{name: dns.CanonicalName(h.Name), typ: h.Rrtype, class: h.Class}
		if s.name == folded {
			h.Name = qname
		}
		if sig, ok := rr.(*dns.RRSIG); ok {
			s.covered = sig.TypeCovered
		}
		i, ok := at[s]
		if !ok {
			i = len(sets)
			at[s] = i
			sets = append(sets, nil)
		}
		sets[i] = append(sets[i], rr)
	}
	out := rrs[:0]
	for _, s := range sets {
		out = append(out, s...)
	}
	return out
}
