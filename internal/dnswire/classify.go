package dnswire

// Kind says what an answer means for the name that was asked.
type Kind uint8

// The kinds of answers (RFC 2308 sections 2 and 5).
const (
	// Failure: any rcode but NOERROR and NXDOMAIN.
	Failure Kind = iota
	// Positive: the type asked for exists at the end of the CNAME chain.
	Positive
	// NoData: the name at the end of the chain exists, the type does not; or
	// the chain has no end.
	NoData
	// NXDomain: the name at the end of the chain does not exist.
	NXDomain
	// Referral: no answer, but name servers to ask for the name at the end
	// of the chain: the server does not recurse. RFC 2308 section 2.2 tells
	// it from NODATA by NS records without an SOA record; the AA bit does
	// not count, since it is about the qname and not the end of the chain.
	Referral
)

// maxChain is how many CNAME records an answer may have; longer chains are loops
// or abuse. No resolver in front of us follows more: dnsmasq 10, unbound 11, Knot
// 13, BIND 16 (before 9.20; now 11).
const maxChain = 16

// Summary is the meaning of a Response.
type Summary struct {
	Kind Kind
	// TTL in seconds for which the answer as a whole holds: the least of
	// its records' TTLs, and for negative answers of the SOA's MINIMUM too
	// (RFC 2308 section 5).
	TTL uint32
	// Cacheable is false for negative answers without an SOA record that
	// covers the name at the end of the chain (RFC 2308 section 5, which
	// leaves the end of a broken CNAME chain undefined), for NXDOMAIN for a
	// name of which there is data, for chains that loop or are too long, for
	// truncated answers (RFC 2181 section 9), for failures and for
	// referrals.
	Cacheable bool
}

// Classify tells what the accepted answer means. It follows CNAMEs in the
// answer section from the qname, whatever their order. A name with a CNAME has
// no other data (RFC 1034 section 3.6.2): other records there are not looked at.
func (r *Response) Classify(msg []byte) Summary {
	if r.NameLen == 0 || r.Rcode != RcodeNoError && r.Rcode != RcodeNXDomain {
		return Summary{Kind: Failure}
	}
	end, broken := r.chainEnd(msg)
	var last, owner [MaxNameLen]byte
	name := AppendName(last[:0], msg, end)
	covers := func(rec *Record) bool {
		return IsSubdomain(name, AppendName(owner[:0], msg, rec.Off))
	}
	ttl, minimum := uint32(maxTTL), uint32(0)
	var found, ns, soa, covered bool
	for i := range r.Records {
		rec := &r.Records[i]
		ttl = min(ttl, rec.TTL(msg))
		switch {
		case !matches(rec.Class, r.Class):
		case rec.Section == Answer:
			found = found || matches(rec.Type, r.Type) && NameEqual(msg, rec.Off, end)
		case rec.Section != Authority:
		case rec.Type == TypeNS:
			ns = ns || covers(rec)
		case rec.Type == TypeSOA:
			soa = true
			if !covered && covers(rec) {
				covered, minimum = true, ttlAt(msg, rec.End-4)
			}
		}
	}
	whole := !broken && r.Flags&FlagTC == 0
	switch {
	case found && r.Rcode == RcodeNoError:
		return Summary{Kind: Positive, TTL: ttl, Cacheable: whole}
	case ns && !soa && r.Rcode == RcodeNoError:
		return Summary{Kind: Referral}
	}
	s := Summary{Kind: NoData}
	if r.Rcode == RcodeNXDomain {
		s.Kind = NXDomain
	}
	if covered && whole && !found {
		s.TTL, s.Cacheable = min(ttl, minimum), true
	}
	return s
}

// matches reports whether a record's type or class is the one asked for.
func matches(rec, asked uint16) bool { return rec == asked || asked == TypeANY }

// chainEnd returns the offset of the name at the end of the CNAME chain that
// starts at the qname, and whether the chain loops or is too long. Its work is
// bounded by maxChain, not by the size of the answer.
func (r *Response) chainEnd(msg []byte) (end int, broken bool) {
	end = HeaderLen
	if matches(TypeCNAME, r.Type) {
		return end, false
	}
	var buf [maxChain]*Record
	cnames := buf[:0]
	for i := range r.Records {
		rec := &r.Records[i]
		if rec.Section != Answer {
			break
		}
		if rec.Type != TypeCNAME || !matches(rec.Class, r.Class) {
			continue
		}
		if len(cnames) == maxChain {
			return end, true
		}
		cnames = append(cnames, rec)
	}
	for step := 0; ; step++ {
		next := -1
		for _, c := range cnames {
			if NameEqual(msg, c.Off, end) {
				next = c.DataOff
				break
			}
		}
		if next < 0 || step == len(cnames) {
			return end, next >= 0
		}
		end = next
	}
}
