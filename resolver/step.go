package resolver

import (
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// The client of a walk that found no winner, or one whose answer is too large
// for it, goes on by itself and asks the walk's other names, its steps, one after
// the other.

const (
	// leftNames bounds the steps that are remembered as such.
	leftNames = 4096
	// leftFor is how long: a walk's answer is kept for maxWalkTTL, and its
	// client may take as long again for the steps.
	leftFor = 2 * maxWalkTTL
	// leftAgain is how often it is noted anew: not for every hit.
	leftAgain = time.Second
)

// leaveSteps prepares for the steps of a walk's client.
func (r *Resolver) leaveSteps(w *search.Walk, q upstream.Question, now time.Duration) {
	if w.Expands() {
		return // its client does not walk
	}
	r.walks.leave(w, now)
	name := make([]byte, 0, dnswire.MaxNameLen)
	for i := 1; i < w.Len()-1; i++ {
		if name, ok := w.Candidate(name, i); ok {
			r.deny(name, q, now)
		}
	}
}

// deny has the NXDOMAIN of a name's other address family be that of the type in
// question too (RFC 2308 section 5: it is the name's), as the walk had it. The
// last name of a walk is none for this: see search.Decide.
func (r *Resolver) deny(name []byte, q upstream.Question, now time.Duration) {
	q = named(q, name)
	other := sibling(q.Type)
	if other == q.Type || r.withoutAAAA(q) {
		return
	}
	key := cache.AppendKey(make([]byte, 0, len(name)+8), name, q.Type, q.Class, q.DO, q.CD)
	if _, kind := r.cache.Peek(key, now); kind != cache.Miss {
		return
	}
	e, kind := r.cache.Peek(cache.AppendKey(nil, name, other, q.Class, q.DO, q.CD), now)
	if kind != cache.Negative || e.Rcode() != dnswire.RcodeNXDomain {
		return
	}
	msg := render(&result{outcome: outcome{entry: e, ok: true}}, q, name, now)
	var resp dnswire.Response
	if err := dnswire.ParseResponse(msg, &resp); err == nil { // else the step is asked, as any question
		r.cache.Store(key, msg, &resp, now)
	}
}

// leave remembers those steps of a walk that look like the first step of
// another. The second step of a search for www.example.uk, in the domain
// svc.cluster.local, reads like the first of a search for www.example in a
// namespace uk; and to a client of a namespace shop, so does the third of one
// for web-0.web.shop.svc. To take them for that would find the wrong host.
func (w *walks) leave(walk *search.Walk, now time.Duration) {
	s, l := w.search.Load(), walk.List()
	if s == nil {
		return // searching was turned off meanwhile
	}
	name := make([]byte, 0, dnswire.MaxNameLen)
	for i := 1; i < walk.Len(); i++ {
		name, ok := walk.Candidate(name, i)
		if !ok {
			continue
		}
		// Clients of which nothing is known may get this walk's answer from
		// the cache: for them, any label may be a namespace.
		if _, ok := search.Collapse(l, name); !ok && s.Policy.Namespace(name) == nil {
			continue
		}
		w.mu.Lock()
		if at, ok := w.left.Peek(string(name)); !ok || now-at >= leftAgain {
			w.left.Add(string(name), now)
		}
		w.mu.Unlock()
		w.anyLeft.Store(true)
	}
}

// begun returns the walk that a client with the list has begun with qname, if
// it is to be finished. If not, the client goes on by itself: glibc does so with
// a name of ndots dots or more, once it has asked it as it is.
func (w *walks) begun(l *search.List, qname []byte, now time.Duration) (search.Walk, bool) {
	if walk, ok := search.Collapse(l, qname); ok && !w.isLeft(qname, now) {
		return walk, true
	}
	if walk, ok := search.Listed(l, qname); ok {
		w.leave(&walk, now)
	}
	return search.Walk{}, false
}

// isLeft reports whether qname is a step that was left to its client.
func (w *walks) isLeft(qname []byte, now time.Duration) bool {
	if !w.anyLeft.Load() {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	at, ok := w.left.Peek(string(qname))
	if ok && now-at >= leftFor {
		w.left.Remove(string(qname))
		w.anyLeft.Store(w.left.Len() > 0)
		return false
	}
	return ok
}
