package resolver

import (
	"encoding/binary"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// aaaaNegativeTTL is how long a denial of IPv6 addresses holds, in seconds:
// the policy does not change from one minute to the next.
const aaaaNegativeTTL = 300

// withoutAAAA reports whether the policy answers the question: IPv6 addresses
// of a name outside the zone that keeps them. A validating client (DO) is
// spared: to it, our unsigned denial would be bogus. HTTPS and SVCB records
// stay as they are, ipv6hint included: a hint is tried beside A and AAAA (RFC
// 9460 section 7.3), and a client without IPv6 passes over it.
func (r *Resolver) withoutAAAA(q upstream.Question) bool {
	zone := *r.aaaaZone.Load()
	return zone != nil && q.Type == dnswire.TypeAAAA && !q.DO && !dnswire.IsSubdomain(q.Name, zone)
}

// noAAAA answers NODATA (RFC 2308 section 2.2): the name may well exist, so it
// is never NXDOMAIN, which would deny its IPv4 addresses too (RFC 4074 section
// 4.2). The SOA record is the root's name and ours: it covers every name.
func (r *Resolver) noAAAA(key []byte, q upstream.Question) outcome {
	msg := dnswire.AppendQuery(nil, 0, dnswire.FlagQR|dnswire.FlagRD|dnswire.FlagRA, q.Name, q.Type, q.Class, nil)
	dnswire.SetCounts(msg, 1, 0, 1, 0)
	rdata := append([]byte(nil), policyZone...) // MNAME
	rdata = append(rdata, "\x0ahostmaster"...)  // RNAME
	rdata = append(rdata, policyZone...)
	for _, n := range []uint32{1, 3600, 600, 86400, aaaaNegativeTTL} { // serial, refresh, retry, expire, minimum
		rdata = binary.BigEndian.AppendUint32(rdata, n)
	}
	msg = append(msg, 0)
	msg = binary.BigEndian.AppendUint16(msg, dnswire.TypeSOA)
	msg = binary.BigEndian.AppendUint16(msg, q.Class)
	msg = binary.BigEndian.AppendUint32(msg, aaaaNegativeTTL)
	msg = binary.BigEndian.AppendUint16(msg, uint16(len(rdata))) //nolint:gosec // 76
	msg = append(msg, rdata...)
	var resp dnswire.Response
	if err := dnswire.ParseResponse(msg, &resp); err != nil {
		return outcome{failure: failureOf(err)}
	}
	return r.store(key, msg, &resp, r.cache.Now(), aaaaNegativeTTL*time.Second)
}

// policyZone is dnsguard.invalid, which nobody can own (RFC 6761 section 6.4).
const policyZone = "\x08dnsguard\x07invalid\x00"
