package upstream

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
)

// route is where the questions for some zones go.
type route struct {
	protocol Protocol
	sources  []Server
	budget   *budget
	gate     gate
	// files holds, by its place among the sources, what a file last gave.
	files map[int][]netip.AddrPort
	// servers is replaced as a whole when a file changes.
	servers atomic.Pointer[[]*server]
}

// routes finds the route of a name.
type routes map[string]*route

// match returns the route of the longest zone that the folded wire-form name is
// in, or nil.
func (r routes) match(name []byte) *route {
	for off := 0; off < len(name); off += 1 + int(name[off]) {
		if found := r[string(name[off:])]; found != nil {
			return found
		}
	}
	return nil
}

// add enters a route under its zones.
func (r routes) add(zones []string, to *route) error {
	for _, zone := range zones {
		key, err := zoneKey(zone)
		if err != nil {
			return err
		}
		if r[key] != nil {
			return fmt.Errorf("zone %q: two routes", zone)
		}
		r[key] = to
	}
	return nil
}

// addresses returns the route's servers in order, each once.
func (r *route) addresses() []netip.AddrPort {
	var all []netip.AddrPort
	for i, s := range r.sources {
		if s.File != "" {
			all = append(all, r.files[i]...)
		} else {
			all = append(all, s.Addr)
		}
	}
	var unique []netip.AddrPort
	for _, a := range all {
		if !slices.Contains(unique, a) && len(unique) < maxServers {
			unique = append(unique, a)
		}
	}
	return unique
}
