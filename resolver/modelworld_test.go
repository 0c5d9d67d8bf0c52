package resolver

import (
	"cmp"
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
	size   [2]int          // how many addresses there are, by family; 0: one
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

// records returns what a name has of a family where it has any: the addresses
// tell the names apart.
func (w *modelWorld) records(t testing.TB, name string, family int) (records []dns.RR) {
	all := slices.Sorted(maps.Keys(w.names))
	i, _ := slices.BinarySearch(all, name)
	owner := name
	if alias := w.names[name].alias; alias != "" {
		records = append(records, rr(t, "%s %d IN CNAME %s", owner, w.ttl, alias))
		owner = alias
	}
	if w.state(name, family) != search.Data {
		return records
	}
	for n := range max(1, w.names[name].size[family]) {
		data := fmt.Sprintf("A 10.%d.%d.%d", n, i/256, i%256)
		if family == 1 {
			data = fmt.Sprintf("AAAA fd01::%x:%x", n, i+1)
		}
		records = append(records, rr(t, "%s %d IN %s", owner, w.ttl, data))
	}
	return records
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
		if state == search.Data || state == search.NoData {
			m.Answer = w.records(t, q.Name, family)
		}
		switch state {
		case search.Failed:
			if w.timeouts {
				return errors.New("no answer")
			}
			m.Rcode = dns.RcodeServerFailure
			return nil
		case search.Data:
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

// modelReply is what a client makes of an answer: the state, and the addresses:
// the first, and how many.
type modelReply struct {
	state search.State
	host  string
}

// direct returns what a client gets that asks the world itself. One without TCP
// makes do with what an upstream has room for in 512 octets.
func (w *modelWorld) direct(t testing.TB, c *modelClient) func(name string) [2]modelReply {
	return func(name string) (r [2]modelReply) {
		for f := range r {
			r[f].state = w.state(name, f)
			if r[f].state != search.Data {
				continue
			}
			m := new(dns.Msg).SetQuestion(name, modelFamilies[f])
			m.Answer = w.records(t, name, f)
			if !c.tcp() {
				m.Truncate(dns.MinMsgSize)
			}
			r[f] = readAddresses(t, name, m)
		}
		return r
	}
}

// readAddresses reads the addresses at the end of the chain of CNAMEs that begins
// with a name.
func readAddresses(t testing.TB, name string, m *dns.Msg) modelReply {
	first, n := "", 0
	for _, record := range m.Answer {
		if record.Header().Name != name {
			t.Errorf("%s is not in the chain from the question's name: %v", record.Header().Name, m)
		}
		switch record := record.(type) {
		case *dns.CNAME:
			name = record.Target
			continue
		case *dns.A:
			first = cmp.Or(first, record.A.String())
		case *dns.AAAA:
			first = cmp.Or(first, record.AAAA.String())
		}
		n++
	}
	if n == 0 {
		return modelReply{state: search.NoData}
	}
	return modelReply{search.Data, fmt.Sprintf("%s x%d", first, n)}
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
				w.names[base+"."+d+"."] = modelName{states: states[r.IntN(len(states))], size: modelSize(r)}
			}
		}
		if r.IntN(2) == 0 {
			n := modelName{states: odd[r.IntN(len(odd))], size: modelSize(r)}
			if strings.HasSuffix(base, "cluster.local") { // also the first step of a search for web-0.web
				n.states = states[r.IntN(len(states))]
			}
			if r.IntN(3) == 0 {
				n.alias = "edge.cdn.example."
			}
			w.names[base+"."] = n
		}
	}
	for _, ns := range []string{"shop", "other"} {
		if r.IntN(2) == 0 {
			w.names["web."+ns+".svc.cluster.local."] = modelName{states: states[r.IntN(4)]}
		}
	}
	return w
}

// hasService reports whether there is a Service web in a namespace, and nothing in
// the cluster that could be taken for its pod web-0: there, a client that asks
// for that pod by its whole name is certain to get its own answer.
func (w *modelWorld) hasService(ns string) bool {
	_, ok := w.names["web."+ns+".svc.cluster.local."]
	for _, d := range []string{"svc.cluster.local.", "cluster.local."} {
		if _, taken := w.names["web-0.web."+d]; taken {
			return false
		}
	}
	return ok
}

// modelSize is how many addresses a name has: one, or about as many as fit into
// 512 octets, with a CNAME and without.
func modelSize(r *rand.Rand) (size [2]int) {
	if r.IntN(2) == 0 {
		return size
	}
	return [2]int{[]int{1, 22 + r.IntN(10), 60}[r.IntN(3)], []int{1, 12 + r.IntN(6), 60}[r.IntN(3)]}
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
		fmt.Fprintf(&b, "%s %v %v %s\n", name, n.states, n.size, n.alias)
	}
	return b.String()
}
