package resolver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// modelFamilies are the types of questions, as index 0 and 1.
var modelFamilies = [2]uint16{dns.TypeA, dns.TypeAAAA}

// modelName is what a name of a world has.
type modelName struct {
	states [2]search.State // by family
	alias  string          // a CNAME to this name stands before what there is
}

// modelWorld is a world of names. One that is not in it does not exist.
type modelWorld struct {
	names    map[string]modelName // absolute
	ttl      uint32               // of records
	denial   uint32               // of denials; 0: not to be cached
	flaky    int                  // one in so many questions fails; 0: none
	timeouts bool                 // what fails does not answer, rather than SERVFAIL
	chance   *chance
}

// chance is a source of random numbers for several goroutines.
type chance struct {
	mu sync.Mutex
	r  *rand.Rand
}

func (c *chance) intN(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.r.IntN(n)
}

func (w *modelWorld) state(name string, family int) search.State {
	if n, ok := w.names[name]; ok {
		return n.states[family]
	}
	return search.NXDomain
}

// address returns the address of a name: it tells the names apart.
func (w *modelWorld) address(name string, family int) string {
	all := slices.Sorted(maps.Keys(w.names))
	i, _ := slices.BinarySearch(all, name)
	if family == 0 {
		return fmt.Sprintf("10.1.%d.%d", i/256, i%256)
	}
	return fmt.Sprintf("fd01::%x", i+1)
}

// answer is a fakeForwarder's answer.
func (w *modelWorld) answer(t testing.TB) func(context.Context, *dns.Msg) error {
	return func(ctx context.Context, m *dns.Msg) error {
		q := m.Question[0]
		family := slices.Index(modelFamilies[:], q.Qtype)
		state := w.state(q.Name, family)
		if w.flaky > 0 && w.chance.intN(w.flaky) == 0 {
			state = search.Failed
		}
		wait := time.Duration(5+w.chance.intN(10)) * time.Millisecond
		if state == search.Failed && w.timeouts {
			wait = 1500 * time.Millisecond
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
		owner := q.Name
		if alias := w.names[owner].alias; alias != "" && (state == search.Data || state == search.NoData) {
			m.Answer = append(m.Answer, rr(t, "%s %d IN CNAME %s", owner, w.ttl, alias))
			owner = alias
		}
		switch state {
		case search.Failed:
			if w.timeouts {
				return errors.New("no answer")
			}
			m.Rcode = dns.RcodeServerFailure
			return nil
		case search.Data:
			m.Answer = append(m.Answer, rr(t, "%s %d IN %s %s", owner, w.ttl, dns.TypeToString[q.Qtype], w.address(q.Name, family)))
			return nil
		case search.NXDomain:
			m.Rcode = dns.RcodeNameError
		}
		if w.denial > 0 {
			m.Ns = []dns.RR{rr(t, ". %[1]d IN SOA ns.dns. hostmaster. 1 7200 1800 86400 %[1]d", w.denial)}
		}
		return nil
	}
}

// modelReply is what a client makes of an answer: the state, and the address.
type modelReply struct {
	state search.State
	host  string
}

// direct asks the world itself.
func (w *modelWorld) direct(name string) (r [2]modelReply) {
	for f := range r {
		r[f].state = w.state(name, f)
		if r[f].state == search.Data {
			r[f].host = w.address(name, f)
		}
	}
	return r
}

// modelBases are the names that are looked up. Some are others without their
// last label: the second step of a search for www.a.uk, in svc.cluster.local,
// looks like the first of one for www.a in a namespace uk.
func modelBases() []string {
	return []string{"db", "db.other", "db.other.svc", "web-0.web", "web-0.web.shop.svc", "web-0.web.other.svc.cluster.local", "www.a", "www.a.uk", "www.a.uk.co", "www.a.shop", "a.b.c.d.e", "a.b.c.d.e.f", "a.b.c.d.e.f.shop"}
}

// newModelWorld makes a random world. Names that are denied are so for both
// families, but for one whose other family fails; only a name as it is may be on
// a server that denies it for the one family and not for the other (RFC 4074
// section 4.2).
func newModelWorld(r *rand.Rand) *modelWorld {
	const data, none, denied, failed = search.Data, search.NoData, search.NXDomain, search.Failed
	w := &modelWorld{names: map[string]modelName{}, chance: &chance{r: rand.New(rand.NewPCG(r.Uint64(), 0))}}
	w.ttl = []uint32{0, 1, 5, 300}[r.IntN(4)]
	w.denial = []uint32{0, 1, 5, 300}[r.IntN(4)]
	w.timeouts = r.IntN(4) == 0
	states := [][2]search.State{
		{data, data},
		{data, none},
		{none, data},
		{none, none},
		{denied, denied},
		{failed, failed},
		{data, failed},
		{failed, data},
		{none, failed},
		{failed, none},
		{denied, failed},
		{failed, denied},
	}
	switch {
	case r.IntN(2) == 0: // a world without failures
		states = states[:5]
	case w.timeouts: // no time is left to learn that such a name does not exist
		states = states[:10]
	}
	odd := append(slices.Clone(states), [2]search.State{data, denied}, [2]search.State{denied, data})
	for _, base := range modelBases() {
		for _, d := range []string{"shop.svc.cluster.local", "other.svc.cluster.local", "svc.cluster.local", "cluster.local", "node.example"} {
			if r.IntN(4) == 0 {
				w.names[base+"."+d+"."] = modelName{states: states[r.IntN(len(states))]}
			}
		}
		if r.IntN(2) == 0 {
			n := modelName{states: odd[r.IntN(len(odd))]}
			if strings.HasSuffix(base, "cluster.local") { // also the first step of a search for web-0.web
				n.states = states[r.IntN(len(states))]
			}
			if r.IntN(3) == 0 {
				n.alias = "edge.cdn.example."
			}
			w.names[base+"."] = n
		}
	}
	return w
}

// settled returns the world in which NXDOMAIN for one family of a name is
// NXDOMAIN for the other, where that fails.
func (w *modelWorld) settled() *modelWorld {
	s := *w
	s.names = maps.Clone(w.names)
	for name, n := range w.names {
		for f := range n.states {
			if n.states[f] == search.Failed && n.states[1-f] == search.NXDomain {
				n.states[f] = search.NXDomain
			}
		}
		s.names[name] = n
	}
	return &s
}

// String tells a world's names.
func (w *modelWorld) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "TTL %d, denials %d, timeouts %v\n", w.ttl, w.denial, w.timeouts)
	for _, name := range slices.Sorted(maps.Keys(w.names)) {
		n := w.names[name]
		fmt.Fprintf(&b, "%s %v %s %s %s\n", name, n.states, w.address(name, 0), w.address(name, 1), n.alias)
	}
	return b.String()
}
