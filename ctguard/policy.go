package ctguard

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// idleAfter is how long a flow must have been idle before it is moved away
// from an endpoint that terminates but still answers. It has to exceed the
// time that a query can be in hand: resolvers that forward give up after two
// seconds per attempt, and the lost reply would cost the client five.
const idleAfter = 3 * time.Second

// Facts is what the guard has learnt on this node beside the [Snapshot].
type Facts struct {
	// Timeouts are the kernel's; zero means [DefaultTimeouts].
	Timeouts Timeouts

	// Zones are the conntrack zones to judge beside the default zone 0.
	Zones []uint16

	// Translated holds the frontends to which a translated flow was seen.
	Translated map[netip.AddrPort]bool

	// Silent holds the endpoints that used to answer probes and do not now.
	Silent map[netip.AddrPort]bool

	// Evidence tells whether silence counts against endpoints that do not
	// terminate.
	Evidence bool

	// IPVS holds the virtual servers of IPVS.
	IPVS map[netip.AddrPort]bool

	// Doubt tells that the snapshot may be old, Probes that endpoints are probed
	// which are not known. If either, Met holds those of which some snapshot has
	// said that they serve, and those that have left: others may have come since.
	Doubt  bool
	Probes bool
	Met    map[netip.AddrPort]bool

	// Mute holds the endpoints that are not known and do not answer probes.
	Mute map[netip.AddrPort]bool

	// Tombstones are the frontends that have gone not long ago.
	Tombstones []Frontend
}

// Frontend is an address and port at which a Service is reached.
type Frontend struct {
	Addr    netip.AddrPort
	Service string // namespace/name
	Port    string // the port's name
}

// Policy is a [Snapshot] and [Facts], prepared for judging flows. It is
// immutable and safe for concurrent use.
type Policy struct {
	facts     Facts
	frontends map[netip.AddrPort]*target
}

// target is where the flows to one frontend may lead.
type target struct {
	frontend  Frontend
	endpoints map[netip.AddrPort]Endpoint // those of the frontend's family
	gone      bool                        // a tombstone

	serving   int // endpoints that serve
	steady    int // of these, those that do not terminate
	answering int // of those that serve, the ones not believed dead
	reliable  int // of the steady ones, the same
}

// NewPolicy prepares a policy. It has no side effect, keeps s and facts, and
// never fails: what makes no sense (an invalid address, a port 0, an endpoint
// of a family that the Service has no address of) takes no part.
func NewPolicy(s Snapshot, facts Facts) *Policy {
	if facts.Timeouts == (Timeouts{}) {
		facts.Timeouts = DefaultTimeouts()
	}
	p := &Policy{facts: facts, frontends: make(map[netip.AddrPort]*target)}
	for i := range s.Services {
		svc := &s.Services[i]
		for j := range svc.Ports {
			port := &svc.Ports[j]
			for _, a := range svc.Addrs {
				p.add(svc, port, a, port.Port)
			}
			for _, a := range s.NodeAddrs {
				p.add(svc, port, a, port.NodePort)
			}
		}
	}
	for _, f := range facts.Tombstones {
		if _, again := p.frontends[f.Addr]; !again {
			p.frontends[f.Addr] = &target{frontend: f, gone: true}
		}
	}
	for _, t := range p.frontends {
		t.count(p)
	}
	return p
}

// add makes a frontend. Two Services can claim the same one (a shared load
// balancer address): then the endpoints of both are right.
func (p *Policy) add(svc *Service, port *Port, addr netip.Addr, number uint16) {
	addr = addr.Unmap()
	if !reachable(addr, number) {
		return
	}
	at := netip.AddrPortFrom(addr.WithZone(""), number)
	t := p.frontends[at]
	if t == nil {
		t = &target{
			frontend:  Frontend{Addr: at, Service: svc.Name, Port: port.Name},
			endpoints: make(map[netip.AddrPort]Endpoint, len(port.Endpoints)),
		}
		p.frontends[at] = t
	}
	for _, e := range port.Endpoints {
		ip := e.Addr.Addr().Unmap()
		if !reachable(ip, e.Addr.Port()) || ip.Is4() != addr.Is4() {
			continue
		}
		e.Addr = netip.AddrPortFrom(ip.WithZone(""), e.Addr.Port())
		if o, twice := t.endpoints[e.Addr]; twice {
			// Slices overlap while the controller moves endpoints between
			// them. A flow is harmed only by believing the worse one.
			e.Serving = e.Serving || o.Serving
			e.Terminating = e.Terminating && o.Terminating
		}
		t.endpoints[e.Addr] = e
	}
}

// reachable tells whether packets can be sent there.
func reachable(a netip.Addr, port uint16) bool {
	return a.IsValid() && !a.IsUnspecified() && port != 0
}

func (t *target) count(p *Policy) {
	for _, e := range t.endpoints {
		if !e.Serving {
			continue
		}
		t.serving++
		dead := p.dead(e)
		if !dead {
			t.answering++
		}
		if !e.Terminating {
			t.steady++
			if !dead {
				t.reliable++
			}
		}
	}
}

// dead tells whether an endpoint that serves is believed dead.
func (p *Policy) dead(e Endpoint) bool {
	return p.facts.Silent[e.Addr] && (e.Terminating || p.facts.Evidence)
}

// Decide judges one flow.
func (p *Policy) Decide(f Flow) (Verdict, Reason) {
	r := p.reason(f)
	return r.Verdict(), r
}

func (p *Policy) reason(f Flow) Reason {
	if f.Proto != unix.IPPROTO_UDP {
		return NotUDP
	}
	t := p.frontends[f.Orig.Dst]
	if t == nil {
		return NoFrontend
	}
	// An endpoint on a host's network can be a frontend itself, of an external
	// IP or a load balancer's: then a flow that looks untranslated is in order.
	e, known := t.endpoints[f.Reply.Src]
	switch {
	case !p.watches(f.OriginalZone()):
		return OtherZone
	case p.facts.IPVS[f.Orig.Dst]:
		return IPVSHeld
	case f.Reply.Src == f.Orig.Dst && !known:
		if t.serving > 0 && p.facts.Translated[f.Orig.Dst] {
			return Untranslated
		}
		return UntranslatedHeld
	case t.gone:
		return FrontendGone
	case known && e.Serving && e.Terminating:
		return p.terminating(t, f)
	case known && e.Serving && p.dead(e) && t.reliable > 0 && f.Unanswered():
		// As long as it is ready, the next packet can come back here. Each
		// time that is as likely as the endpoint's share of all.
		return Unanswered
	case known && e.Serving:
		return Serving
	case p.stranger(f.Reply.Src):
		return EndpointUnknown
	case t.serving == 0:
		return NoEndpoints
	case known:
		return NotServing
	case t.hasServing(f.Reply.Src.Addr()):
		return PortChanged
	default:
		return EndpointGone
	}
}

// stranger tells whether an endpoint that does not serve by the snapshot may have
// come since, as far as is known.
func (p *Policy) stranger(at netip.AddrPort) bool {
	return (p.facts.Doubt || p.facts.Probes) && !p.facts.Met[at] && !p.facts.Mute[at]
}

// terminating judges a flow to an endpoint that serves and terminates.
// kube-proxy gives it no new flows as long as another endpoint is ready, and
// leaves it those that it has, even if the process behind it is dead already.
func (p *Policy) terminating(t *target, f Flow) Reason {
	switch {
	case p.dead(t.endpoints[f.Reply.Src]):
		// Without another that answers, the next packet would come back here.
		if t.answering == 0 {
			return TerminatingLast
		}
		return TerminatingSilent
	case t.steady == 0:
		// kube-proxy gives new flows to terminating endpoints now.
		return TerminatingLast
	case p.facts.Timeouts.Idle(f) >= idleAfter:
		return TerminatingIdle
	default:
		return TerminatingBusy
	}
}

func (p *Policy) watches(zone uint16) bool {
	return zone == 0 || slices.Contains(p.facts.Zones, zone)
}

// translates tells whether f shows that flows to its frontend are translated.
func (p *Policy) translates(f Flow) bool {
	t := p.frontends[f.Orig.Dst]
	return t != nil && !t.gone && f.Reply.Src != f.Orig.Dst && p.watches(f.OriginalZone())
}

// withTranslated is p with the knowledge that flows to more are translated.
func (p *Policy) withTranslated(more map[netip.AddrPort]bool) *Policy {
	q := *p
	q.facts.Translated = maps.Clone(more)
	maps.Copy(q.facts.Translated, p.facts.Translated)
	return &q
}

// servingEndpoints are the endpoints that serve some port, and whether they
// terminate.
func (p *Policy) servingEndpoints() map[netip.AddrPort]bool {
	es := make(map[netip.AddrPort]bool)
	for _, t := range p.frontends {
		for a, e := range t.endpoints {
			if e.Serving {
				before, known := es[a]
				es[a] = e.Terminating && (before || !known)
			}
		}
	}
	return es
}

func (t *target) hasServing(ip netip.Addr) bool {
	for a, e := range t.endpoints {
		if a.Addr() == ip && e.Serving {
			return true
		}
	}
	return false
}

// frontend is the frontend to which f goes, if it goes to one.
func (p *Policy) frontend(f Flow) (Frontend, bool) {
	if t := p.frontends[f.Orig.Dst]; t != nil {
		return t.frontend, true
	}
	return Frontend{}, false
}

// present are all frontends, without tombstones, by address and port.
func (p *Policy) present() []Frontend {
	var fs []Frontend
	for _, t := range p.frontends {
		if !t.gone {
			fs = append(fs, t.frontend)
		}
	}
	slices.SortFunc(fs, func(a, b Frontend) int { return a.Addr.Compare(b.Addr) })
	return fs
}

// ports are the ports of all frontends, ascending.
func (p *Policy) ports() []uint16 {
	var ports []uint16
	for a := range p.frontends {
		ports = append(ports, a.Port())
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// maxWalks is how many IPv4 addresses with the same port are asked for one by
// one. Each costs the kernel a walk over its whole table (about 0.25 µs per
// entry); asking for any address costs one walk, and the reading of entries
// that are not ours. For IPv6 the kernel cannot compare addresses anyway.
const maxWalks = 2

// matches are the questions that together reach every flow to a frontend, IPv4
// first.
func (p *Policy) matches() []Match {
	type group struct {
		any  netip.Addr // of the family
		port uint16
	}
	groups := make(map[group][]Match)
	for a := range p.frontends {
		g := group{netip.IPv6Unspecified(), a.Port()}
		if a.Addr().Is4() {
			g.any = netip.IPv4Unspecified()
		}
		groups[g] = append(groups[g], Match{Dst: a})
	}
	var ms []Match
	for g, each := range groups {
		if len(each) == 1 || len(each) <= maxWalks && g.any.Is4() {
			ms = append(ms, each...)
		} else {
			ms = append(ms, Match{Dst: netip.AddrPortFrom(g.any, g.port)})
		}
	}
	slices.SortFunc(ms, func(a, b Match) int {
		return cmp.Or(a.Dst.Compare(b.Dst), a.Src.Compare(b.Src))
	})
	return ms
}
