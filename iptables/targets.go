package iptables

import (
	"fmt"
	"net/netip"
	"slices"
)

// Targets are what may change while an Interceptor runs.
type Targets struct {
	// Addresses are intercepted, over UDP and TCP. No interface may hold them.
	Addresses []netip.AddrPort
	// ClusterIPs are kube-dns's, at most one of each family. Addresses that
	// are not among them are link-local ones: when nobody takes what goes
	// there, the fallback sends it to the ClusterIP of the same family.
	ClusterIPs []netip.Addr
	// Provisional: there may be more ClusterIPs. The fallback that a predecessor
	// left, which may know them, stays as it is for now.
	Provisional bool
	// Exclude are clients that are never intercepted.
	Exclude []netip.Prefix
}

// services returns a service for each address and protocol, in order.
func (t *Targets) services() []Service {
	var out []Service
	for _, a := range t.Addresses {
		for _, p := range protos() {
			out = append(out, Service{Addr: a, Proto: p})
		}
	}
	slices.SortFunc(out, Service.compare)
	return out
}

func (t *Targets) validate() error {
	if len(t.Addresses) == 0 {
		return &ConfigError{Key: "listen", Problem: "no address to intercept", Remedy: "give a link-local address, or set intercept.mode to cluster-ip"}
	}
	for i, a := range t.Addresses {
		switch ip := a.Addr(); {
		// fe80::/10 means something only with a zone, RFC 4007 section 6, and a pod's
		// nameserver has none.
		case !ip.IsValid() || a.Port() == 0, ip.IsUnspecified(), ip.IsLoopback(), ip.IsMulticast(), ip.Is4In6(), ip.Zone() != "",
			ip.Is6() && ip.IsLinkLocalUnicast():
			return &ConfigError{
				Key: "listen", Problem: fmt.Sprintf("%v cannot be intercepted", a),
				Remedy: "give a unicast address without zone, for example 169.254.20.10 or fd53:dd:20::10",
			}
		case slices.Contains(t.Addresses[:i], a):
			return &ConfigError{Key: "listen", Problem: fmt.Sprintf("%v is there twice", a), Remedy: "remove one"}
		}
	}
	if a, b, twice := oneFamily(t.ClusterIPs); twice {
		return &ConfigError{
			Key: "kubernetes.dnsService", Problem: fmt.Sprintf("two ClusterIPs of one family, %v and %v", a, b),
			Remedy: "name one Service",
		}
	}
	// A fallback reply tells only the ClusterIP: which of two link-local
	// addresses it must come from could not be known.
	if a, b, twice := oneFamily(t.linkLocal()); twice {
		return &ConfigError{
			Key: "listen", Problem: fmt.Sprintf("two link-local addresses of one family, %v and %v", a, b),
			Remedy: "keep one of each family",
		}
	}
	return nil
}

// linkLocal returns the addresses that are not ClusterIPs.
func (t *Targets) linkLocal() []netip.Addr {
	var out []netip.Addr
	for _, a := range t.Addresses {
		if !slices.Contains(t.ClusterIPs, a.Addr()) && !slices.Contains(out, a.Addr()) {
			out = append(out, a.Addr())
		}
	}
	return out
}

// oneFamily finds two addresses of one family.
func oneFamily(addrs []netip.Addr) (a, b netip.Addr, found bool) {
	for i, a := range addrs {
		for _, b := range addrs[i+1:] {
			if family(a) == family(b) {
				return a, b, true
			}
		}
	}
	return a, b, false
}

// Apply changes what is intercepted. Services that stay are taken on without
// a gap. An address that cannot be routed to the sockets is an error of Run's
// (Stats.RepairError), and is not taken until it can.
func (i *Interceptor) Apply(t Targets) error {
	if err := t.validate(); err != nil {
		return err
	}
	i.work.Lock()
	defer i.work.Unlock()
	if i.kernel == nil {
		return fmt.Errorf("apply interception: %w", ErrClosed)
	}
	before := i.swapTargets(t)
	_, _ = i.ensureRouting() // Run tells, and tries again
	if _, err := i.ensureRules(); err != nil {
		i.swapTargets(before)
		return fmt.Errorf("apply interception: %w", err)
	}
	gone := slices.DeleteFunc(before.services(), func(s Service) bool { return slices.Contains(t.services(), s) })
	i.mu.Lock()
	for _, s := range gone {
		delete(i.withdrawn, s)
		delete(i.taking, s)
		delete(i.probed, s)
	}
	i.mu.Unlock()
	if len(gone) == 0 {
		return nil
	}
	if err := i.prune(i.ruleSet(i.slot.number)); err != nil {
		return fmt.Errorf("apply interception: %w", err)
	}
	return nil
}

func (i *Interceptor) swapTargets(t Targets) (before Targets) {
	i.mu.Lock()
	defer i.mu.Unlock()
	before, i.targets = i.targets, t
	return before
}

// Withdraw leaves the selected services to kube-proxy, in one transaction,
// until Restore. Answers to what has been taken still leave as they must. The
// reason is for events and Stats.
func (i *Interceptor) Withdraw(reason string, which func(Service) bool) error {
	return i.arm(which, func(s Service) { i.withdrawn[s] = reason })
}

// Restore takes the selected services again, as soon as an answer has left.
func (i *Interceptor) Restore(which func(Service) bool) error {
	return i.arm(which, func(s Service) { delete(i.withdrawn, s) })
}

func (i *Interceptor) arm(which func(Service) bool, set func(Service)) error {
	i.work.Lock()
	defer i.work.Unlock()
	i.mu.Lock()
	for _, s := range i.targets.services() {
		if which(s) {
			set(s)
		}
	}
	i.mu.Unlock()
	_, err := i.ensureRules() // if it fails, Run tries again
	return err
}
