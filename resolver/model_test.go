package resolver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// The model: what libcs find in a random world, through the whole pipeline and
// without it. As in the model of package search, the libcs are written from
// their behaviour (cmd/dnsguard compares the real ones); unlike there, the walk
// under test is the real one, with its cache, its flights and its failures, and
// A and AAAA at the same time.

// modelFamilies are the types of questions, as index 0 and 1.
var modelFamilies = [2]uint16{dns.TypeA, dns.TypeAAAA} //nolint:gochecknoglobals // a constant

// modelName is what a name of a world has.
type modelName struct {
	states [2]search.State // by family
	alias  string          // a CNAME to this name stands before the data
}

// modelWorld is a world of names. One that is not in it does not exist.
type modelWorld struct {
	names    map[string]modelName // absolute
	ttl      uint32               // of records
	denial   uint32               // of denials; 0: not to be cached
	hurry    bool                 // AAAA is answered before A
	flaky    int                  // one in so many questions fails; 0: none
	timeouts bool                 // what fails does not answer, rather than SERVFAIL
	rand     *rand.Rand
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
		if w.flaky > 0 && w.rand.IntN(w.flaky) == 0 {
			state = search.Failed
		}
		wait := time.Duration(5+w.rand.IntN(10)) * time.Millisecond
		if state == search.Failed && w.timeouts {
			wait = 1500 * time.Millisecond
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
		m.RecursionAvailable = true
		switch state {
		case search.Failed:
			if w.timeouts {
				return errors.New("no answer")
			}
			m.Rcode = dns.RcodeServerFailure
			return nil
		case search.Data:
			owner := q.Name
			if alias := w.names[q.Name].alias; alias != "" {
				m.Answer = append(m.Answer, rr(t, "%s %d IN CNAME %s", owner, w.ttl, alias))
				owner = alias
			}
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

// modelAsk asks for both families of a name.
type modelAsk func(name string) [2]modelReply

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

// modelClient is a client's configuration, as its resolv.conf has it.
type modelClient struct {
	addr    netip.AddrPort
	domains []string
	ndots   int
}

// candidates are the names that libcs try for a name; absolute tells that the
// name as it is comes first.
func (c *modelClient) candidates(name string) (list []string, absolute bool) {
	for _, d := range c.domains {
		list = append(list, name+"."+d+".")
	}
	if strings.Count(name, ".") >= c.ndots {
		return append([]string{name + "."}, list...), true
	}
	return append(list, name+"."), false
}

// glibc is getaddrinfo of glibc: addresses of either family end the search, and
// nothing else does; what failed meanwhile is told at the end.
func (c *modelClient) glibc(name string, ask modelAsk) string {
	list, _ := c.candidates(name)
	result := "not found"
	for _, n := range list {
		r := ask(n)
		if r[0].state == search.Data || r[1].state == search.Data {
			return r[0].host + " " + r[1].host
		}
		for _, f := range r {
			if f.state == search.Failed {
				result = "try again"
			}
		}
	}
	return result
}

// musl is getaddrinfo of musl: A is judged before AAAA; only NXDOMAIN goes on to
// the next name.
func (c *modelClient) musl(name string, ask modelAsk) string {
	list, absolute := c.candidates(name)
	if absolute {
		list = list[:1]
	}
next:
	for _, n := range list {
		r := ask(n)
		for _, f := range r {
			switch f.state {
			case search.Failed:
				return "try again"
			case search.NXDomain:
				continue next
			}
		}
		if r[0].host+r[1].host == "" {
			return "no data"
		}
		return r[0].host + " " + r[1].host
	}
	return "not found"
}

// modelAsker asks the pipeline, A and AAAA at once, in either order.
type modelAsker struct {
	t    testing.TB
	r    *Resolver
	rand *rand.Rand
	addr netip.AddrPort
}

// oneAnswer takes the answer of a flight.
type oneAnswer chan []byte

func (o oneAnswer) owe() {}

func (o oneAnswer) reply(_ *waiter, msg []byte) { o <- slices.Clone(msg) }

func (a *modelAsker) ask(name string) (replies [2]modelReply) {
	var answers [2]oneAnswer
	first := a.rand.IntN(2)
	for _, f := range []int{first, 1 - first} {
		answers[f] = make(oneAnswer, 1)
		m := new(dns.Msg).SetQuestion(name, modelFamilies[f])
		packed, err := m.Pack()
		if err != nil {
			a.t.Fatal(err)
		}
		src := source{transport: UDP, replier: answers[f], peer: a.addr}
		if reply, waits := a.r.answer(newScratch(new(counters)), packed, false, &src, a.r.cache.Now(), nil); !waits {
			answers[f] <- reply
		}
		switch a.rand.IntN(3) {
		case 0: // the second comes right behind the first
		case 1:
			synctest.Wait()
		case 2:
			time.Sleep(time.Duration(a.rand.IntN(30)) * time.Millisecond)
		}
	}
	for f := range replies {
		replies[f] = a.read(name, f, <-answers[f])
	}
	return replies
}

// read makes of an answer what a libc does: addresses at the end of the chain
// of CNAMEs that begins with the question's name.
func (a *modelAsker) read(name string, family int, packed []byte) modelReply {
	m := new(dns.Msg)
	if err := m.Unpack(packed); err != nil {
		a.t.Fatal(err)
	}
	switch m.Rcode {
	case dns.RcodeNameError:
		return modelReply{state: search.NXDomain}
	case dns.RcodeSuccess:
	default:
		return modelReply{state: search.Failed}
	}
	for _, record := range m.Answer {
		if record.Header().Name != name {
			a.t.Errorf("%s is not in the chain from the question's name: %v", record.Header().Name, m)
		}
		switch record := record.(type) {
		case *dns.CNAME:
			name = record.Target
		case *dns.A:
			return modelReply{search.Data, record.A.String()}
		case *dns.AAAA:
			return modelReply{search.Data, record.AAAA.String()}
		}
	}
	return modelReply{state: search.NoData}
}

// modelBases are the names that are looked up. Some are others without their
// last label: where it is not known whose list it is, "a.b.c" in the domain
// svc.cluster.local looks like "a.b" in a namespace c.
func modelBases() []string {
	return []string{"db", "db.other", "db.other.svc", "web-0.web", "web-0.web.other.svc.cluster.local", "www.a", "www.a.uk", "www.a.uk.co", "a.b.c.d.e", "a.b.c.d.e.f"}
}

// newModelWorld makes a random world. Names that are denied are so for both
// families, but for one whose other family fails; only a name as it is may be on
// a server that denies it for the one family and not for the other (RFC 4074
// section 4.2).
func newModelWorld(r *rand.Rand, domains []string) *modelWorld {
	const data, none, denied, failed = search.Data, search.NoData, search.NXDomain, search.Failed
	w := &modelWorld{names: map[string]modelName{}, rand: r}
	w.ttl = []uint32{0, 1, 5, 300}[r.IntN(4)]
	w.denial = []uint32{0, 1, 5, 300}[r.IntN(4)]
	w.timeouts = r.IntN(4) == 0
	states := [][2]search.State{
		{data, data}, {data, none}, {none, data}, {none, none}, {denied, denied},
		{failed, failed}, {data, failed}, {failed, data}, {none, failed}, {failed, none}, {denied, failed}, {failed, denied},
	}
	odd := append(slices.Clone(states), [2]search.State{data, denied}, [2]search.State{denied, data})
	if r.IntN(2) == 0 { // a world without failures
		states, odd = states[:5], slices.Concat(states[:5], odd[len(odd)-2:])
	}
	for _, base := range modelBases() {
		for _, d := range domains {
			if r.IntN(4) == 0 {
				w.names[base+"."+d+"."] = modelName{states: states[r.IntN(len(states))]}
			}
		}
		if r.IntN(2) == 0 {
			n := modelName{states: odd[r.IntN(len(odd))]}
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

// modelPods are the clients: some that are known, and one that is not and whose
// list is read off its names.
func modelPods() (pods map[netip.Addr]search.Pod, unknown netip.Addr, namespaces map[netip.Addr]string) {
	two := 2
	shop, other, short, unknown := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.9")
	pods = map[netip.Addr]search.Pod{
		shop:  {Namespace: "shop"},
		other: {Namespace: "other"},
		short: {Namespace: "shop", NDots: &two},
	}
	return pods, unknown, map[netip.Addr]string{shop: "shop", other: "other", short: "shop", unknown: "shop"}
}

// playModel looks names up in a random world, one after the other, with time
// passing between, and calls judge with each result.
func playModel(t *testing.T, seed uint64, flaky int, judge func(w *modelWorld, c *modelClient, libc, name, got string)) (questions int) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 0))
		pods, unknown, namespaces := modelPods()
		addrs := slices.SortedFunc(maps.Keys(namespaces), netip.Addr.Compare)
		var domains []string
		for _, d := range []string{"shop.svc.cluster.local", "other.svc.cluster.local", "svc.cluster.local", "cluster.local", "node.example"} {
			domains = append(domains, d)
		}
		w := newModelWorld(r, domains)
		w.flaky = flaky
		f := &fakeForwarder{answer: w.answer(t)}
		res := newTestResolver(t, f, withSearch(t, func(s *Search) {
			s.Client = func(a netip.Addr) (*search.List, bool) {
				p, known := pods[a]
				return s.Policy.ListOf(p), known
			}
		}))
		defer end(t, res)
		for range 8 {
			addr := addrs[r.IntN(len(addrs))]
			c := &modelClient{
				addr: netip.AddrPortFrom(addr, 4000), ndots: 5,
				domains: []string{namespaces[addr] + ".svc.cluster.local", "svc.cluster.local", "cluster.local", "node.example"},
			}
			if p := pods[addr]; addr != unknown && p.NDots != nil {
				c.ndots = *p.NDots
			}
			a := &modelAsker{t: t, r: res, rand: r, addr: c.addr}
			base := modelBases()[r.IntN(len(modelBases()))]
			if r.IntN(2) == 0 {
				judge(w, c, "glibc", base, c.glibc(base, a.ask))
			} else {
				judge(w, c, "musl", base, c.musl(base, a.ask))
			}
			time.Sleep([]time.Duration{0, 300 * time.Millisecond, 2 * time.Second, 10 * time.Second}[r.IntN(4)])
		}
		questions = f.total()
	})
	return questions
}

func (c *modelClient) alone(w *modelWorld, libc, name string) string {
	if libc == "glibc" {
		return c.glibc(name, w.direct)
	}
	return c.musl(name, w.direct)
}

// TestModel: through the pipeline, every client finds what it would have found
// alone, in thousands of look-ups in random worlds. One thing it may find beyond
// that: where a name is denied for one family and fails for the other, a libc
// may stop, and we go on, since NXDOMAIN is for the name (RFC 8020 section 2).
func TestModel(t *testing.T) {
	const worlds = 1500
	lookups, beyond, questions := 0, 0, 0
	for seed := range uint64(worlds) {
		questions += playModel(t, seed, 0, func(w *modelWorld, c *modelClient, libc, name, got string) {
			lookups++
			want := c.alone(w, libc, name)
			if got == want {
				return
			}
			if settled := c.alone(w.settled(), libc, name); got == settled {
				beyond++
				return
			}
			t.Errorf("world %d: %s in %v with ndots %d finds %q for %s, alone %q\n%v", seed, libc, c.domains, c.ndots, got, name, want, w)
		})
		if t.Failed() {
			break
		}
	}
	t.Logf("%d worlds, %d look-ups, %d beyond, %d questions upstream", worlds, lookups, beyond, questions)
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
