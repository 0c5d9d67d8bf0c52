package iptables

import (
	"maps"
	"net/netip"
	"slices"
)

// Stats is what an Interceptor knows of itself at one moment.
type Stats struct {
	Backend Backend
	Reason  string // why this backend, for the log
	// Active tells for each address whether it is taken, over UDP and TCP.
	Active map[netip.AddrPort]bool
	// Withdrawals counts withdrawals of a service by reason: ReasonSilent, and
	// what Withdraw was given.
	Withdrawals map[string]uint64
	Repairs     uint64
	Bypassed    int // clients that are let past now
	// ForeignRules are routing rules of others that sort before ours.
	ForeignRules []string

	// What went wrong at the last try, nil if nothing: to repair, to look
	// which services are alive, to let clients past, and to probe a service.
	RepairError, AliveError, BypassError error
	ProbeErrors                          map[Service]error
}

// Stats returns the present state.
func (i *Interceptor) Stats() Stats {
	i.mu.Lock()
	defer i.mu.Unlock()
	s := i.stats
	s.Withdrawals = maps.Clone(s.Withdrawals)
	s.ForeignRules = slices.Clone(s.ForeignRules)
	s.Active = make(map[netip.AddrPort]bool)
	s.ProbeErrors = make(map[Service]error)
	for _, v := range i.targets.services() {
		if _, seen := s.Active[v.Addr]; !seen {
			s.Active[v.Addr] = true
		}
		s.Active[v.Addr] = s.Active[v.Addr] && i.taking[v]
		if err := i.probed[v].err; err != nil {
			s.ProbeErrors[v] = err
		}
	}
	return s
}
