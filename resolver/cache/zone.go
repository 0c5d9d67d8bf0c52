package cache

import (
	"fmt"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Zone holds the caps for the names at and below Name; the longest zone that
// holds the qname decides.
type Zone struct {
	Name     string        // "." or "cluster.local", any case, final dot or not
	Positive time.Duration // longest life of a positive answer
	Negative time.Duration // longest life of NXDOMAIN and NODATA
	// How long after its expiry an answer may stand in for one that cannot be
	// had; 0: not at all. Leave StaleNXDomain 0 for the cluster zone: see the
	// package comment.
	Stale         time.Duration // positive answers
	StaleNoData   time.Duration
	StaleNXDomain time.Duration
}

// maxPeriod bounds every duration of a Zone. RFC 8767 section 4 has seven days
// for TTLs, which is more than a node's cache ever needs for either.
const maxPeriod = 7 * 24 * time.Hour

// zones finds caps by folded wire-form zone name.
type zones map[string]Zone

func newZones(list []Zone) (zones, error) {
	z := make(zones, len(list))
	for _, zone := range list {
		name, err := wireName(zone.Name)
		if err != nil {
			return nil, fmt.Errorf("zone %q: %w", zone.Name, err)
		}
		if _, twice := z[name]; twice {
			return nil, fmt.Errorf("zone %q: given twice", zone.Name)
		}
		for _, d := range []struct {
			what string
			d    time.Duration
		}{
			{"positive", zone.Positive},
			{"negative", zone.Negative},
			{"stale", zone.Stale},
			{"stale NODATA", zone.StaleNoData},
			{"stale NXDOMAIN", zone.StaleNXDomain},
			{"stale NODATA", zone.StaleNoData},
			{"stale NXDOMAIN", zone.StaleNXDomain},
		} {
			if d.d < 0 || d.d > maxPeriod {
				return nil, fmt.Errorf("zone %q: %s %v: not between 0 and %v", zone.Name, d.what, d.d, maxPeriod)
			}
		}
		z[name] = zone
	}
	if _, ok := z["\x00"]; !ok {
		return nil, fmt.Errorf(`zone ".": missing, and some names are in no other`)
	}
	return z, nil
}

// wireName returns a name in presentation format as folded wire form.
func wireName(name string) (string, error) {
	var buf [dnswire.MaxNameLen + 1]byte
	n, err := dns.PackDomainName(dns.Fqdn(name), buf[:], 0, nil, false)
	if err != nil {
		return "", fmt.Errorf("not a domain name: %w", err)
	}
	return string(dnswire.AppendFolded(nil, buf[:n])), nil
}

// find returns the caps for a folded wire-form name. It takes one map look-up
// for each label.
func (z zones) find(name []byte) Zone {
	for {
		if zone, ok := z[string(name)]; ok {
			return zone
		}
		name = name[1+int(name[0]):] // the root ends it: newZones sees to that
	}
}
