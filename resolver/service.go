package resolver

import (
	"context"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// The first step of a search for web-3.web reads like the whole name of a pod of
// the headless Service web in the client's own namespace, and peers of a
// StatefulSet ask each other by such names, also while one of them is away. Its
// client then wants to hear that, and not of a host web-3.web in the node's
// domain or on the Internet. Which of the two it meant cannot be told, but to
// leave the walk to it is right for both. So where there is such a Service, no
// walk of ours leaves the cluster's zone.

// serviceAbove is the Service that a walk's queried name would be a pod of. Nil:
// the name is none of a pod.
type serviceAbove struct {
	policy *search.Policy
	name   []byte        // folded wire form
	asked  <-chan result // set once it is asked
}

// serviceAbove returns the Service above a walk's queried name.
func (r *Resolver) serviceAbove(w *search.Walk) *serviceAbove {
	s := r.walks.search.Load()
	if s == nil || w.Expands() {
		return nil
	}
	name := s.Policy.ServiceAbove(make([]byte, 0, dnswire.MaxNameLen), w)
	if name == nil {
		return nil
	}
	return &serviceAbove{policy: s.Policy, name: name}
}

// abroad reports whether it matters to a name of the walk whether there is such
// a Service.
func (s *serviceAbove) abroad(name []byte) bool { return s != nil && !s.policy.InCluster(name) }

// askService asks for the Service while names are asked, if there is room.
func (r *Resolver) askService(ctx context.Context, q upstream.Question, s *serviceAbove) {
	if s.asked == nil && r.flights.beginAhead(1) {
		s.asked = r.fetchAhead(ctx, s.name, q, true)
	}
}

// ofService reports whether there is the Service, or may be.
func (c *course) ofService(ctx context.Context, s *serviceAbove) bool {
	var res result
	if s.asked != nil {
		res = <-s.asked
	} else {
		res = c.r.fetch(ctx, s.name, c.q, c.q.Type, true)
	}
	c.holds(&res)
	return res.state() != search.NXDomain
}
