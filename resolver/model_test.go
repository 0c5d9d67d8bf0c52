package resolver

import (
	"cmp"
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

// modelClient is a client: its configuration, as its resolv.conf has it, and its
// libc.
type modelClient struct {
	libc    string // glibc or musl
	addr    netip.Addr
	domains []string
	ndots   int
}

// tcp says whether the libc asks again over TCP where TC is set. musl did not
// before 1.2.4.
func (c *modelClient) tcp() bool { return c.libc != "musl" }

// candidates are the names that the libc tries for a name.
func (c *modelClient) candidates(name string) []string {
	var list []string
	for _, d := range c.domains {
		list = append(list, name+"."+d+".")
	}
	switch {
	case strings.HasSuffix(name, "."):
		return []string{name}
	case strings.Count(name, ".") < c.ndots:
		return append(list, name+".")
	case c.libc == "musl":
		return []string{name + "."}
	}
	return append([]string{name + "."}, list...)
}

// step says what the libc makes of the answers about one name: ends is its
// result, if that is the end of the search, and else notes what it will tell
// when nothing is found.
func (c *modelClient) step(r [2]modelReply) (ends, notes string) {
	if c.libc == "musl" {
		return musl(r), ""
	}
	return glibc(r)
}

// glibc is getaddrinfo of glibc: addresses of either family end the search, and
// nothing else does; what failed meanwhile is told at the end.
func glibc(r [2]modelReply) (ends, notes string) {
	if r[0].state == search.Data || r[1].state == search.Data {
		return r[0].host + " " + r[1].host, ""
	}
	if r[0].state == search.Failed || r[1].state == search.Failed {
		return "", "try again"
	}
	return "", ""
}

// musl is getaddrinfo of musl: A is judged before AAAA; only NXDOMAIN goes on to
// the next name.
func musl(r [2]modelReply) (ends string) {
	for _, f := range r {
		switch f.state {
		case search.Failed:
			return "try again"
		case search.NXDomain:
			return ""
		}
	}
	if r[0].host+r[1].host == "" {
		return "no data"
	}
	return r[0].host + " " + r[1].host
}

// find looks a name up.
func (c *modelClient) find(name string, ask func(string) [2]modelReply) string {
	result := "not found"
	for _, n := range c.candidates(name) {
		ends, notes := c.step(ask(n))
		if ends != "" {
			return ends
		}
		result = cmp.Or(notes, result)
	}
	return result
}

// possible returns what a look-up can find where every question may fail.
func (c *modelClient) possible(t testing.TB, name string, w *modelWorld) map[string]bool {
	found, results := map[string]bool{}, map[string]bool{"not found": true}
	for _, n := range c.candidates(name) {
		next := map[string]bool{}
		for fail := range 4 {
			r := w.direct(t, c)(n)
			for f := range r {
				if fail&(1<<f) != 0 {
					r[f] = modelReply{state: search.Failed}
				}
			}
			switch ends, notes := c.step(r); {
			case ends != "":
				found[ends] = true
			case notes != "":
				next[notes] = true
			default:
				maps.Copy(next, results)
			}
		}
		results = next
	}
	maps.Copy(found, results)
	return found
}

// modelAsker asks the pipeline, A and AAAA at once, in either order.
type modelAsker struct {
	t    testing.TB
	r    *Resolver
	rand *rand.Rand
	addr netip.AddrPort
	s    *scratch
	tcp  bool // asks again over TCP where TC is set
}

// oneAnswer takes the answer of a flight.
type oneAnswer chan []byte

func (o oneAnswer) owe() {}

func (o oneAnswer) reply(_ *waiter, msg []byte) { o <- slices.Clone(msg) }

func (a *modelAsker) ask(name string) (replies [2]modelReply) {
	var answers [2]oneAnswer
	first := a.rand.IntN(2)
	for _, f := range []int{first, 1 - first} {
		answers[f] = a.send(name, f, UDP)
		switch a.rand.IntN(3) {
		case 0: // the second comes right behind the first
		case 1:
			synctest.Wait()
		case 2:
			time.Sleep(time.Duration(a.rand.IntN(30)) * time.Millisecond)
		}
	}
	for f := range replies {
		m := a.receive(answers[f])
		if m.Truncated && a.tcp {
			m = a.receive(a.send(name, f, TCP))
		}
		replies[f] = a.read(name, m)
	}
	return replies
}

// send asks a question.
func (a *modelAsker) send(name string, family int, transport Transport) oneAnswer {
	answer := make(oneAnswer, 1)
	packed, err := new(dns.Msg).SetQuestion(name, modelFamilies[family]).Pack()
	if err != nil {
		a.t.Fatal(err)
	}
	src := source{transport: transport, replier: answer, peer: a.addr}
	if reply, waits := a.r.answer(a.s, packed, false, &src, a.r.cache.Now(), nil); !waits {
		answer <- reply
	}
	return answer
}

func (a *modelAsker) receive(answer oneAnswer) *dns.Msg {
	packed, m := <-answer, new(dns.Msg)
	if err := m.Unpack(packed); err != nil {
		a.t.Fatal(err)
	}
	return m
}

// read makes of an answer what a libc does.
func (a *modelAsker) read(name string, m *dns.Msg) modelReply {
	switch m.Rcode {
	case dns.RcodeNameError:
		return modelReply{state: search.NXDomain}
	case dns.RcodeSuccess:
		return readAddresses(a.t, name, m)
	}
	return modelReply{state: search.Failed}
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
func playModel(t *testing.T, seed uint64, flaky int, judge func(w *modelWorld, c *modelClient, name, got string)) (questions int) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 0))
		pods, unknown, namespaces := modelPods()
		addrs := slices.SortedFunc(maps.Keys(namespaces), netip.Addr.Compare)
		w := newModelWorld(r)
		w.flaky = flaky
		f := &fakeForwarder{answer: w.answer(t)}
		res := newTestResolver(t, f, withSearch(t, func(s *Search) {
			s.Client = func(a netip.Addr) (*search.List, bool) {
				p, known := pods[a]
				return s.Policy.ListOf(p), known
			}
		}))
		defer end(t, res)
		s := newScratch(new(counters))
		for range 8 {
			addr := addrs[r.IntN(len(addrs))]
			c := &modelClient{
				libc: []string{"glibc", "musl"}[r.IntN(2)], addr: addr, ndots: 5,
				domains: []string{namespaces[addr] + ".svc.cluster.local", "svc.cluster.local", "cluster.local", "node.example"},
			}
			if p := pods[addr]; p.NDots != nil {
				c.ndots = *p.NDots
			}
			name := modelBases()[r.IntN(len(modelBases()))]
			if r.IntN(6) == 0 && w.hasService(namespaces[addr]) {
				name = "web-0.web." + namespaces[addr] + ".svc.cluster.local."
			}
			if strings.HasSuffix(name, "other.svc.cluster.local") && (addr == unknown || namespaces[addr] == "other") {
				continue // asked as it is, it looks like the first step of a search for web-0.web
			}
			a := &modelAsker{t: t, r: res, rand: r, addr: netip.AddrPortFrom(addr, 4000), s: s, tcp: c.tcp()}
			judge(w, c, name, c.find(name, a.ask))
			time.Sleep([]time.Duration{0, 300 * time.Millisecond, 2 * time.Second, 10 * time.Second}[r.IntN(4)])
		}
		questions = f.total()
	})
	return questions
}

// TestModel: through the pipeline, every client finds what it would have found
// alone, and as many addresses, in thousands of look-ups in random worlds. One
// thing it may find beyond
// that: where a name is denied for one family and fails for the other, a libc
// may stop, and we go on, since NXDOMAIN is for the name (RFC 8020 section 2).
func TestModel(t *testing.T) {
	const worlds = 1000
	lookups, beyond, questions := 0, 0, 0
	for seed := range uint64(worlds) {
		questions += playModel(t, seed, 0, func(w *modelWorld, c *modelClient, name, got string) {
			lookups++
			want := c.find(name, w.direct(t, c))
			switch got {
			case want:
			case c.find(name, w.settled().direct(t, c)):
				beyond++
			default:
				t.Errorf("world %d: %v finds %q for %s, alone %q\n%v", seed, c, got, name, want, w)
			}
		})
		if t.Failed() {
			break
		}
	}
	t.Logf("%d worlds, %d look-ups, %d beyond, %d questions upstream", worlds, lookups, beyond, questions)
	if beyond > lookups/50 {
		t.Errorf("%d of %d look-ups found more than alone: the worlds are too odd to test the rule", beyond, lookups)
	}
}

// TestModelFlaky: where any question may fail at any time, every client finds
// what it could have found alone, had some of its own questions failed. So it
// never finds addresses of two names, nor another host than a failure of its
// own would have led it to.
func TestModelFlaky(t *testing.T) {
	const worlds = 1000
	lookups, questions := 0, 0
	for seed := range uint64(worlds) {
		questions += playModel(t, seed, 8, func(w *modelWorld, c *modelClient, name, got string) {
			lookups++
			if !c.possible(t, name, w)[got] && !c.possible(t, name, w.settled())[got] {
				t.Errorf("world %d: %v finds %q for %s, alone one of %v\n%v", seed, c, got, name, slices.Sorted(maps.Keys(c.possible(t, name, w))), w)
			}
		})
		if t.Failed() {
			break
		}
	}
	t.Logf("%d worlds, %d look-ups, %d questions upstream", worlds, lookups, questions)
}
