package dnswire

import (
	"bytes"
	"encoding/binary"
)

// Kind says what an answer means for the name that was asked.
type Kind uint8

// The kinds of answers (RFC 2308 sections 2 and 5).
const (
	// Failure: any rcode but NOERROR and NXDOMAIN.
	Failure Kind = iota
	// Positive: the type asked for exists at the end of the CNAME chain.
	Positive
	// NoData: the name at the end of the chain exists, the type does not.
	NoData
	// NXDomain: the name at the end of the chain does not exist.
	NXDomain
	// Referral: no answer, but name servers to ask: the server does not
	// recurse. RFC 2308 section 2.2 tells it from NODATA by the missing SOA.
	Referral
)

// maxChain is how many CNAMEs are followed within one answer, as unbound does
// (its max-query-restarts is 11); longer chains are loops or abuse.
const maxChain = 12

// Summary is the meaning of a Response.
type Summary struct {
	Kind Kind
	// TTL in seconds for which the answer as a whole holds: the least of
	// its records' TTLs, and for negative answers of the SOA's MINIMUM too
	// (RFC 2308 section 5).
	TTL uint32
	// Cacheable is false for negative answers without an SOA record that
	// covers the name at the end of the chain (RFC 2308 section 5, which
	// leaves the end of a broken CNAME chain undefined), for truncated
	// answers (RFC 2181 section 9), for failures and for referrals.
	Cacheable bool
}

// Classify tells what the accepted answer means. It follows CNAMEs in the
// answer section from the qname.
func (r *Response) Classify(msg []byte) Summary {
	if r.NameLen == 0 || r.Rcode != RcodeNoError && r.Rcode != RcodeNXDomain {
		return Summary{Kind: Failure}
	}
	s := Summary{TTL: 1<<31 - 1}
	soa, ns := -1, false
	for i := range r.Records {
		rec := &r.Records[i]
		s.TTL = min(s.TTL, rec.TTL(msg))
		if rec.Section == Authority {
			switch rec.Type {
			case TypeSOA:
				soa = i
			case TypeNS:
				ns = true
			}
		}
	}
	var buf [MaxNameLen + 1]byte
	last, found, broken := r.followChain(msg, buf[:0])
	switch {
	case r.Rcode == RcodeNXDomain:
		s.Kind = NXDomain
	case found:
		s.Kind = Positive
		s.Cacheable = r.Flags&FlagTC == 0
		return s
	case soa < 0 && ns && r.Flags&FlagAA == 0:
		s.Kind, s.TTL = Referral, 0
		return s
	default:
		s.Kind = NoData
	}
	if soa < 0 || broken {
		s.TTL = 0
		return s
	}
	rec := &r.Records[soa]
	s.TTL = min(s.TTL, binary.BigEndian.Uint32(msg[rec.End-4:]))
	var zone [MaxNameLen + 1]byte
	s.Cacheable = r.Flags&FlagTC == 0 && IsSubdomain(last, AppendName(zone[:0], msg, rec.Off))
	return s
}

// followChain returns the folded name at the end of the CNAME chain that
// starts at the qname, whether the type asked for exists there, and whether
// the chain loops or is too long.
func (r *Response) followChain(msg, buf []byte) (last []byte, found, broken bool) {
	name := AppendFolded(buf, msg[HeaderLen:HeaderLen+r.NameLen])
	var owner [MaxNameLen + 1]byte
	for range maxChain {
		next := -1
		for i := range r.Records {
			rec := &r.Records[i]
			if rec.Section != Answer {
				break
			}
			match := rec.Type == r.Type || r.Type == TypeANY
			if !match && rec.Type != TypeCNAME {
				continue
			}
			if !bytes.Equal(AppendName(owner[:0], msg, rec.Off), name) {
				continue
			}
			if match {
				return name, true, false
			}
			next = rec.DataOff
		}
		if next < 0 {
			return name, false, false
		}
		name = AppendName(name[:0], msg, next)
	}
	return name, false, true
}
