package resolver

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// Search finishes clients' search-list walks. A walk's answer is cached under
// the question and the client's list, so that clients with other lists never
// see it, and a walk that has been made is a hit like any other.
type Search struct {
	Policy   *search.Policy
	Collapse bool
	// Types are the qtypes that are walked: A and AAAA, and others at will.
	Types []uint16
	// Client returns the list of a client by its address. known is false
	// for an address of which nothing is known: then the list may be read
	// off the qname. A nil list with known true is never walked for. Nil:
	// nothing is known of anybody.
	Client func(netip.Addr) (list *search.List, known bool)
}

// WalkKind says who began a walk.
type WalkKind uint8

// The kinds of walks.
const (
	WalkCollapse WalkKind = iota // the client
	WalkExpand                   // we, for a client that does not walk
	NumWalkKinds
)

// String returns the kind's name, as in metrics.
func (k WalkKind) String() string { return [...]string{"collapse", "expand"}[k] }

// WalkResult is how a walk ended.
type WalkResult uint8

// The results of walks.
const (
	WalkAnswered WalkResult = iota
	WalkNXDomain            // or left to the client
	WalkError
	NumWalkResults
)

// String returns the result's name, as in metrics.
func (r WalkResult) String() string { return [...]string{"answered", "nxdomain", "error"}[r] }

// Sizes of what walks remember.
const (
	// inferredLists bounds the lists read off qnames that are kept, one a
	// namespace; more namespaces than a node has pods.
	inferredLists = 1024
	// wantedWalks bounds the walks of which the winner is remembered, so
	// that the next time all names up to it are asked at once.
	wantedWalks = 4096
	// maxWalkTTL caps the TTL of the CNAME that leads to a winner: a
	// Service that is created meanwhile comes earlier in the list.
	maxWalkTTL = 30 * time.Second
)

// walks is the state of search-list walks.
type walks struct {
	search atomic.Pointer[Search]

	mu       sync.Mutex
	inferred *simplelru.LRU[string, *search.List]  // by the namespace's label
	by       *search.Policy                        // they were inferred by
	wanted   *simplelru.LRU[string, int]           // winner's index by key
	left     *simplelru.LRU[string, time.Duration] // names left to clients, and when
	anyLeft  atomic.Bool

	done [NumWalkKinds][NumWalkResults]atomic.Uint64
}

func newWalks() *walks {
	w := new(walks)
	// The errors are for sizes below 1.
	w.inferred, _ = simplelru.NewLRU[string, *search.List](inferredLists, nil)
	w.wanted, _ = simplelru.NewLRU[string, int](wantedWalks, nil)
	w.left, _ = simplelru.NewLRU[string, time.Duration](leftNames, nil)
	return w
}

// list returns the search list of the client that asks for qname, a folded
// wire-form name, or nil if there is none to go by.
func (w *walks) list(s *Search, client netip.Addr, qname []byte) *search.List {
	if s.Client != nil {
		if l, known := s.Client(client); known {
			return l
		}
	}
	ns := s.Policy.Namespace(qname)
	if ns == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.by != s.Policy { // the settings have changed
		w.inferred.Purge()
		w.by = s.Policy
	}
	l, ok := w.inferred.Get(string(ns))
	if !ok {
		l = s.Policy.Infer(qname)
		w.inferred.Add(string(ns), l)
	}
	return l
}

// plan returns the walk that the query begins for its client, if any: one that
// the client has begun itself, or one that it is to be spared.
//
// Queries with DO are never walked: a validating client builds its own names,
// and a CNAME of ours would be bogus to it.
func (w *walks) plan(sc *scratch, client netip.Addr, now time.Duration) (search.Walk, bool) {
	s := w.search.Load()
	if s == nil || sc.q.DO || !s.walks(sc.q.Type) {
		return search.Walk{}, false
	}
	qname, l := sc.key[:sc.q.NameLen], sc.list
	if !sc.listGiven {
		l = w.list(s, client, qname)
	}
	if l == nil {
		return search.Walk{}, false
	}
	if s.Collapse {
		if walk, ok := w.begun(l, qname, now); ok {
			return walk, true
		}
	}
	return search.Expand(l, qname)
}

func (s *Search) walks(qtype uint16) bool {
	return slices.Contains(s.Types, qtype)
}

// sibling returns the other address type; other types have none, and are their
// own.
func sibling(qtype uint16) uint16 {
	switch qtype {
	case dnswire.TypeA:
		return dnswire.TypeAAAA
	case dnswire.TypeAAAA:
		return dnswire.TypeA
	}
	return qtype
}

// course is a walk under way.
type course struct {
	r     *Resolver
	key   []byte
	q     upstream.Question
	w     *search.Walk
	kind  WalkKind
	first result        // of the queried name
	until time.Duration // how long the walk would end the same way
}

// walk finds the answer to a walk's question: through the cache, name by name
// in the client's order, each decided for both address families.
func (r *Resolver) walk(ctx context.Context, key []byte, q upstream.Question, w *search.Walk) outcome {
	c := &course{r: r, key: key, q: q, w: w, until: r.cache.Now() + maxWalkTTL}
	if w.Expands() {
		c.kind = WalkExpand
	}
	last := w.Len() - 1
	service := r.serviceAbove(w)
	ahead := r.askAhead(ctx, key, q, w, service)
	skipped := false // a name that would be too long
	for i := range w.Len() {
		name, ok := w.Candidate(make([]byte, 0, dnswire.MaxNameLen), i)
		if !ok {
			skipped = true
			continue
		}
		abroad := service.abroad(name)
		if abroad {
			r.askService(ctx, q, service)
		}
		step, res := r.decide(ctx, name, q, i == last, ahead[i])
		if i == 0 {
			c.first = res
		}
		c.holds(&res)
		if abroad && step != search.Next && c.ofService(ctx, service) {
			r.remember(key, i)
			return c.leave()
		}
		if skipped && i < last && step != search.Next && !w.Expands() {
			return c.leave() // musl goes on like this, but glibc right to the last name
		}
		switch step {
		case search.Fail:
			return c.fail(res.failure)
		case search.Stop:
			return c.leave()
		case search.Win:
			return c.win(ctx, i, name, res)
		}
	}
	return c.leave()
}

// holds notes a result that the walk's end depends on.
func (c *course) holds(res *result) {
	now := c.r.cache.Now()
	if res.ok {
		c.until = min(c.until, now+res.entry.TTL(now))
	}
}

// leave ends the walk with the answer to the client's own question: it goes on
// by itself.
func (c *course) leave() outcome {
	now := c.r.cache.Now()
	c.r.walks.done[c.kind][WalkNXDomain].Add(1)
	c.r.leaveSteps(c.w, c.q, now)
	return c.r.keep(c.key, c.q, &c.first, max(c.until-now, 0), now)
}

// fail ends the walk with an error.
func (c *course) fail(failure cache.Failure) outcome {
	now := c.r.cache.Now()
	c.r.walks.done[c.kind][WalkError].Add(1)
	c.r.leaveSteps(c.w, c.q, now) // glibc goes on all the same
	return c.r.failed(c.key, failure, now)
}

// win ends the walk with what its i-th name has. res is what decided it.
func (c *course) win(ctx context.Context, i int, name []byte, res result) outcome {
	r := c.r
	if res.qtype != c.q.Type {
		res = r.fetch(ctx, name, c.q, c.q.Type, false)
		c.holds(&res)
	}
	if !res.ok {
		return c.fail(res.failure)
	}
	now := r.cache.Now()
	life := max(c.until-now, 0)
	r.remember(c.key, i)
	if i == 0 {
		r.walks.done[c.kind][WalkAnswered].Add(1)
		return r.keep(c.key, c.q, &res, life, now)
	}
	o, err := c.lead(i, name, &res, life, now)
	if err != nil { // too large for any client
		return c.leave()
	}
	r.walks.done[c.kind][WalkAnswered].Add(1)
	if o.entry.Len() > dnswire.MinUDPSize { // some go on by themselves, with both families
		other := c.q
		other.Type = sibling(c.q.Type)
		r.leaveSteps(c.w, c.q, now)
		r.leaveSteps(c.w, other, now)
	}
	return o
}

// decide asks for one name until it is decided how the walk goes on, and
// returns the result that decided it. If the name was asked ahead, that is its
// first answer: asked again, one that may not be cached would cost another
// question.
func (r *Resolver) decide(ctx context.Context, name []byte, q upstream.Question, last bool, ahead <-chan result) (search.Step, result) {
	var own, other search.State
	var res result
	if r.withoutAAAA(named(q, name)) {
		// The policy's NODATA says nothing of the name: its other family does.
		res = r.fetch(ctx, name, q, sibling(q.Type), false)
		return search.DecideByOther(res.state()), res
	}
	for {
		step := search.Decide(own, other, last)
		switch step {
		case search.Ask:
			if ahead != nil {
				res, ahead = <-ahead, nil
			} else {
				// While the other family's question is under way, its
				// NXDOMAIN may save ours.
				res = r.fetch(ctx, name, q, q.Type, !last && other == search.Unknown)
			}
			if res.qtype == q.Type {
				own = res.state()
			} else {
				other = res.state()
			}
		case search.AskSibling:
			switch {
			case sibling(q.Type) != q.Type:
			case own == search.Failed:
				return search.Fail, res
			default:
				return search.Stop, res
			}
			asked := r.fetch(ctx, name, q, sibling(q.Type), false)
			other = asked.state()
			if other == search.Failed || own == search.Failed && other == search.NXDomain {
				res = asked
			}
		default:
			return step, res
		}
	}
}

// named returns the question for another name.
func named(q upstream.Question, name []byte) upstream.Question {
	q.Name = name
	return q
}

// askAhead asks all names up to the one that won last time at once, if the walk
// was made a while ago: what is still cached costs nothing. It returns where the
// answer to each comes, by its index. While there is much to do, names are asked
// one after the other.
func (r *Resolver) askAhead(ctx context.Context, key []byte, q upstream.Question, w *search.Walk, service *serviceAbove) map[int]<-chan result {
	r.walks.mu.Lock()
	winner, ok := r.walks.wanted.Get(string(key))
	r.walks.mu.Unlock()
	if !ok || !r.flights.beginAhead(winner+1) {
		return nil
	}
	ahead := make(map[int]<-chan result, winner+1)
	for i := range winner + 1 {
		name, ok := w.Candidate(make([]byte, 0, dnswire.MaxNameLen), i)
		if !ok {
			r.flights.endAhead()
			continue
		}
		ahead[i] = r.fetchAhead(ctx, name, q, i < w.Len()-1)
		if service.abroad(name) {
			r.askService(ctx, q, service)
		}
	}
	return ahead
}

// fetchAhead asks one name in the room that beginAhead has made.
func (r *Resolver) fetchAhead(ctx context.Context, name []byte, q upstream.Question, either bool) <-chan result {
	res := make(chan result, 1)
	r.running.Go(func() {
		defer r.flights.endAhead()
		res <- r.fetch(ctx, name, q, q.Type, either)
	})
	return res
}

// remember notes which name won.
func (r *Resolver) remember(key []byte, winner int) {
	r.walks.mu.Lock()
	defer r.walks.mu.Unlock()
	r.walks.wanted.Add(string(key), winner)
}

// result is what a name has of a type.
type result struct {
	outcome
	qtype uint16
}

func (r *result) state() search.State {
	switch {
	case !r.ok:
		return search.Failed
	case r.entry.Rcode() == dnswire.RcodeNXDomain:
		return search.NXDomain
	case r.entry.Kind() == cache.Negative:
		return search.NoData
	}
	return search.Data
}
