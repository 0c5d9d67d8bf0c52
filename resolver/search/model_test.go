package search

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The model: what clients find in a world of names, with and without the node
// finishing their walks. It is written from the libcs' behaviour and shares no
// code with the package.

// a and aaaa index a pair of things by address family.
const (
	a    = 0
	aaaa = 1
)

// world tells the state of every name for A and AAAA; a name that is not in it
// does not exist. Addresses are the name itself.
type world map[string][2]State

func (w world) state(name string, typ int) State {
	if s, ok := w[name]; ok {
		return s[typ]
	}
	return NXDomain
}

// reply is what a client sees of an answer: the state, and whose addresses.
type reply struct {
	state State
	host  string
}

// server answers a client's question.
type server func(name string, typ int) reply

// direct is a server without dnsguard.
func (w world) direct(name string, typ int) reply {
	s := w.state(name, typ)
	if s == Data {
		return reply{s, name}
	}
	return reply{state: s}
}

// libc is a client's configuration.
type libc struct {
	domains []string
	ndots   int
}

func (c libc) candidates(name string) []string {
	var list []string
	for _, d := range c.domains {
		list = append(list, name+"."+d)
	}
	if strings.Count(name, ".") >= c.ndots {
		return append([]string{name}, list...)
	}
	return append(list, name)
}

// glibc is getaddrinfo for both families: a name wins if either family has
// addresses; NXDOMAIN, NODATA and SERVFAIL go on, and SERVFAIL is told at the
// end as "try again".
func (c libc) glibc(name string, ask server) string {
	result := "not found"
	for _, n := range c.candidates(name) {
		r4, r6 := ask(n, a), ask(n, aaaa)
		if r4.state == Data || r6.state == Data {
			return fmt.Sprintf("v4 %q v6 %q", r4.host, r6.host)
		}
		if r4.state == Failed || r6.state == Failed {
			result = "try again"
		}
	}
	return result
}

// musl is its getaddrinfo: A is judged before AAAA; SERVFAIL stops, NXDOMAIN
// goes on, NODATA of both stops; with ndots dots or more there is no search.
func (c libc) musl(name string, ask server) string {
	list := c.candidates(name)
	if strings.Count(name, ".") >= c.ndots {
		list = list[:1]
	}
	for _, n := range list {
		r4, r6 := ask(n, a), ask(n, aaaa)
		switch {
		case r4.state == NXDomain:
			continue
		case r4.state == Failed || r6.state == Failed:
			return "try again"
		case r6.state == NXDomain:
			continue
		case r4.state == Data || r6.state == Data:
			return fmt.Sprintf("v4 %q v6 %q", r4.host, r6.host)
		}
		return "no data"
	}
	return "not found"
}

// node is a server that finishes walks by the package's decisions. It counts
// the names that it had to ask.
type node struct {
	t     *testing.T
	w     world
	list  *List
	known map[string][2]State
}

func (n *node) state(name string, typ int) State { return n.known[name][typ] }

func (n *node) ask(name string, typ int) State {
	s := n.known[name]
	s[typ] = n.w.state(name, typ)
	n.known[name] = s
	return s[typ]
}

func (n *node) serve(name string, typ int) reply {
	wire, err := wireName(name)
	if err != nil {
		n.t.Fatal(err)
	}
	walk, ok := Collapse(n.list, wire)
	if !ok {
		return n.w.direct(name, typ)
	}
	for i := range walk.Len() {
		c, fits := walk.Candidate(nil, i)
		if !fits {
			continue
		}
		host := presentation(c)
		step := Ask
		for step == Ask || step == AskSibling {
			step = Decide(n.state(host, typ), n.state(host, 1-typ), i == walk.Len()-1)
			switch step {
			case Ask:
				n.ask(host, typ)
			case AskSibling:
				n.ask(host, 1-typ)
			}
		}
		switch step {
		case Win:
			return n.w.direct(host, typ)
		case Stop:
			return n.w.direct(name, typ)
		case Fail:
			return reply{state: Failed}
		}
	}
	return n.w.direct(name, typ)
}

// presentation unpacks a wire-form name, without the final dot.
func presentation(wire []byte) string {
	var l []string
	for off := 0; wire[off] != 0; off += 1 + int(wire[off]) {
		l = append(l, string(wire[off+1:off+1+int(wire[off])]))
	}
	return strings.Join(l, ".")
}

// randomWorld gives a third of the names that can come up a random state. A
// name fails or is denied for both families alike, but for the last of a walk,
// which may be on a server that denies a name for AAAA that has A.
func randomWorld(r *rand.Rand, bases, domains []string) world {
	w := world{}
	states := [][2]State{
		{Data, Data},
		{Data, NoData},
		{NoData, Data},
		{NoData, NoData},
		{NXDomain, NXDomain},
		{Failed, Failed},
		{Data, Failed},
		{Failed, Data},
	}
	for _, b := range bases {
		for _, d := range domains {
			if r.IntN(3) == 0 {
				w[b+"."+d] = states[r.IntN(len(states))]
			}
		}
		if r.IntN(2) == 0 {
			odd := append(states, [2]State{Data, NXDomain}, [2]State{NXDomain, Data})
			if strings.HasSuffix(b, ".corp.example") || strings.HasSuffix(b, ".cluster.local") { // also inside a search for another base
				odd = states
			}
			w[b] = odd[r.IntN(len(odd))]
		}
	}
	return w
}

// TestModel: with the node finishing walks, every client finds what it would
// have found alone, in thousands of random worlds.
func TestModel(t *testing.T) {
	const worlds = 20000
	r := rand.New(rand.NewPCG(1, 2))
	p, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{"node.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	bases := []string{"db", "api.example", "a.b", "a.b.corp.example", "a.b.svc.cluster.local", "web-0.web", "a.b.c", "a.b.c.d", "a.b.c.d.e", "a.b.c.d.e.f", "x.svc.cluster.local"}
	lookups, collapsed := 0, 0
	for range worlds {
		ndots := []int{1, 2, 3, 5, 5, 5, 15}[r.IntN(7)]
		pod := Pod{Namespace: []string{"default", "shop"}[r.IntN(2)], DNSPolicy: ClusterFirst, NDots: &ndots}
		if r.IntN(3) == 0 {
			pod.Searches = []string{"extra.example"}
		}
		switch r.IntN(6) {
		case 0:
			pod.DNSPolicy, pod.Searches = None, []string{"corp.example", "shop.svc.cluster.local"}
		case 1:
			pod.DNSPolicy, pod.Searches = None, []string{"svc.cluster.local", "corp.example"}
		case 2:
			pod.DNSPolicy, pod.Searches = None, []string{"shop.svc.cluster.local", "corp.example"}
		}
		list := p.ListOf(pod)
		client := libc{ndots: list.NDots}
		for _, d := range list.Domains {
			client.domains = append(client.domains, presentation(d))
		}
		w := randomWorld(r, bases, client.domains)
		n := &node{t: t, w: w, list: list, known: map[string][2]State{}}
		for _, name := range bases {
			for libcName, getaddrinfo := range map[string]func(string, server) string{"glibc": client.glibc, "musl": client.musl} {
				want, got := getaddrinfo(name, w.direct), getaddrinfo(name, n.serve)
				if got != want {
					t.Fatalf("%s, ndots %d, list %v, name %s:\nalone %s\nwith the node %s\nworld %v", libcName, ndots, client.domains, name, want, got, w)
				}
				lookups++
			}
		}
		collapsed += len(n.known)
	}
	if collapsed < worlds {
		t.Errorf("only %d names asked for walks: the test does not test", collapsed)
	}
	t.Logf("%d worlds, %d lookups, %d names asked by the node", worlds, lookups, collapsed)
}

// TestEconomy: a walk asks no name twice, asks none for the other family
// unless NODATA leaves it open, and the second family's walk asks only the
// winner.
func TestEconomy(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{"node.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	list := p.ListOf(Pod{Namespace: "default", DNSPolicy: ClusterFirst})
	w := world{"api.example.com": {Data, Data}}
	n := &node{t: t, w: w, list: list, known: map[string][2]State{}}
	for _, typ := range []int{a, aaaa} {
		if r := n.serve("api.example.com.default.svc.cluster.local", typ); r.host != "api.example.com" {
			t.Errorf("type %d: %v", typ, r)
		}
	}
	asked := map[string][2]bool{}
	for name, s := range n.known {
		asked[name] = [2]bool{s[a] != Unknown, s[aaaa] != Unknown}
	}
	want := map[string][2]bool{
		"api.example.com.default.svc.cluster.local": {true, false},
		"api.example.com.svc.cluster.local":         {true, false},
		"api.example.com.cluster.local":             {true, false},
		"api.example.com.node.example":              {true, false},
		"api.example.com":                           {true, false},
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Error(diff)
	}
}

func TestDecide(t *testing.T) {
	tests := map[string]struct {
		own, sibling State
		last         bool
		want         Step
	}{
		"nothing known":                          {Unknown, Unknown, false, Ask},
		"the sibling's NXDOMAIN settles a name":  {Unknown, NXDomain, false, Next},
		"but not the last":                       {Unknown, NXDomain, true, Ask},
		"the sibling has it":                     {Unknown, Data, false, Win},
		"the sibling's failure settles nothing":  {Unknown, Failed, false, Ask},
		"data":                                   {Data, Unknown, false, Win},
		"data, and a server that denies AAAA":    {Data, NXDomain, false, Win},
		"no such name":                           {NXDomain, Unknown, false, Next},
		"denied by a server that has the other":  {NXDomain, Data, false, Stop},
		"no data: is there any of the other":     {NoData, Unknown, false, AskSibling},
		"no data here, some there":               {NoData, Data, false, Win},
		"a name without addresses":               {NoData, NoData, false, Stop},
		"contradiction":                          {NoData, NXDomain, false, Stop},
		"failure":                                {Failed, Data, false, Fail},
		"failure: is there such a name":          {Failed, Unknown, false, AskSibling},
		"failure where there is no such name":    {Failed, NXDomain, false, Next},
		"failure of the last":                    {Failed, Unknown, true, Fail},
		"failure of the last, other denied":      {Failed, NXDomain, true, Fail},
		"failure of both":                        {Failed, Failed, false, Fail},
		"failure of the sibling, nothing of own": {NoData, Failed, false, Fail},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := Decide(tt.own, tt.sibling, tt.last); got != tt.want {
				t.Errorf("step %d, want %d", got, tt.want)
			}
		})
	}
	for _, own := range []State{Unknown, Data, NoData, NXDomain, Failed} {
		for _, sibling := range []State{Unknown, Data, NoData, NXDomain, Failed} {
			step := Decide(own, sibling, false)
			if own != Unknown && step == Ask || sibling != Unknown && step == AskSibling {
				t.Errorf("%d, %d: asks what is known", own, sibling)
			}
		}
	}
}

func TestListOf(t *testing.T) {
	p, err := New(Config{ClusterDomain: "Cluster.Local.", Domains: []string{"node.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	two, many := 2, 99
	var long []string
	for i := range 40 {
		long = append(long, fmt.Sprintf("d%d.example", i))
	}
	tests := map[string]struct {
		pod     Pod
		domains string
		ndots   int
	}{
		"ClusterFirst":             {Pod{Namespace: "shop", DNSPolicy: ClusterFirst}, "shop.svc.cluster.local svc.cluster.local cluster.local node.example", 5},
		"no policy":                {Pod{Namespace: "shop"}, "shop.svc.cluster.local svc.cluster.local cluster.local node.example", 5},
		"ClusterFirstWithHostNet":  {Pod{Namespace: "shop", DNSPolicy: ClusterFirstWithHostNet}, "shop.svc.cluster.local svc.cluster.local cluster.local node.example", 5},
		"on the host's network":    {Pod{Namespace: "shop", DNSPolicy: ClusterFirstWithHostNet, HostNetwork: true}, "", 0},
		"Default":                  {Pod{Namespace: "shop", DNSPolicy: Default}, "node.example", 1},
		"None":                     {Pod{Namespace: "shop", DNSPolicy: None, Searches: []string{"My.Example."}, NDots: &two}, "my.example", 2},
		"None without searches":    {Pod{Namespace: "shop", DNSPolicy: None}, "", 0},
		"own searches come last":   {Pod{Namespace: "shop", DNSPolicy: ClusterFirst, Searches: []string{"x.example", "cluster.local"}, NDots: &two}, "shop.svc.cluster.local svc.cluster.local cluster.local node.example x.example", 2},
		"ndots has a limit":        {Pod{Namespace: "shop", DNSPolicy: None, Searches: []string{"x.example"}, NDots: &many}, "x.example", 15},
		"a search that is none":    {Pod{Namespace: "shop", DNSPolicy: None, Searches: []string{"a..b"}}, "", 0},
		"a namespace that is none": {Pod{Namespace: "a.b"}, "", 0},
		"kubelet's limit":          {Pod{Namespace: "shop", DNSPolicy: None, Searches: long}, strings.Join(long[:32], " "), 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := p.ListOf(tt.pod)
			if tt.domains == "" {
				if l != nil {
					t.Fatalf("got %v, want none", l)
				}
				return
			}
			var got []string
			for _, d := range l.Domains {
				got = append(got, presentation(d))
			}
			if strings.Join(got, " ") != tt.domains || l.NDots != tt.ndots {
				t.Errorf("got %v, ndots %d, want %s, %d", got, l.NDots, tt.domains, tt.ndots)
			}
		})
	}
}

func TestCollapseApplies(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	for qname, want := range map[string]string{
		"api.example.com.shop.svc.cluster.local": "api.example.com.shop.svc.cluster.local api.example.com.svc.cluster.local api.example.com.cluster.local api.example.com",
		"a.b.shop.svc.cluster.local":             "a.b.shop.svc.cluster.local a.b.svc.cluster.local a.b.cluster.local a.b",
		"a.b.c.d.e.shop.svc.cluster.local":       "a.b.c.d.e.shop.svc.cluster.local a.b.c.d.e.svc.cluster.local a.b.c.d.e.cluster.local a.b.c.d.e",
		"a.b.c.d.e.f.shop.svc.cluster.local":     "", // 5 dots: asked as it is first
		"db.shop.svc.cluster.local":              "", // one label
		"shop.svc.cluster.local":                 "",
		"svc.cluster.local":                      "",
		"a.b.shop.xsvc.cluster.local":            "",
		"a.b.example.com":                        "",
		"a.b.shop.svc.cluster.locals":            "",
	} {
		t.Run(qname, func(t *testing.T) {
			wire, err := wireName(qname)
			if err != nil {
				t.Fatal(err)
			}
			w, ok := Collapse(p.Infer(wire), wire)
			var got []string
			if ok {
				for i := range w.Len() {
					c, _ := w.Candidate(nil, i)
					got = append(got, presentation(c))
				}
			}
			if strings.Join(got, " ") != want {
				t.Errorf("got %v, want %q", got, want)
			}
		})
	}
}

func TestExpand(t *testing.T) {
	two := 2
	p, err := New(Config{ClusterDomain: "cluster.local", NDots: 2, Expand: true})
	if err != nil {
		t.Fatal(err)
	}
	l := p.ListOf(Pod{Namespace: "shop", DNSPolicy: None, Searches: []string{"shop.svc.cluster.local", "svc.cluster.local", "corp"}, NDots: &two})
	for name, want := range map[string]int{"db": 4, "db.other": 4, "a.b.c": 0, "db.corp": 0, "corp": 4, "dbcorp": 4} {
		wire, err := wireName(name)
		if err != nil {
			t.Fatal(err)
		}
		w, ok := Expand(l, wire)
		if ok != (want > 0) {
			t.Fatalf("%s: %v", name, ok)
		}
		if !ok {
			continue
		}
		if c, _ := w.Candidate(nil, 0); presentation(c) != name {
			t.Errorf("%s: the first is %s, want the name as it is", name, presentation(c))
		}
		if c, _ := w.Candidate(nil, 1); presentation(c) != name+".shop.svc.cluster.local" || w.Len() != want {
			t.Errorf("%s: then %s, %d in all", name, presentation(c), w.Len())
		}
	}
	l.Expand = false
	if _, ok := Expand(l, []byte("\x02db\x00")); ok {
		t.Error("expands for a list that does not ask for it")
	}
}

// TestCandidateTooLong: a libc skips what is no name, and so do we.
func TestCandidateTooLong(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{strings.Repeat("d.", 60) + "example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	wire, err := wireName(strings.Repeat("x", 60) + "." + strings.Repeat("y", 60) + "." + strings.Repeat("z", 60) + ".shop.svc.cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	w, ok := Collapse(p.Infer(wire), wire)
	if !ok {
		t.Fatal("no walk")
	}
	var fits []bool
	for i := range w.Len() {
		_, ok := w.Candidate(nil, i)
		fits = append(fits, ok)
	}
	if want := []bool{true, true, true, false, true}; !slices.Equal(fits, want) {
		t.Errorf("fit: %v, want %v", fits, want)
	}
}

// TestNothingAllocates: planning a walk and naming its candidates is free.
func TestNothingAllocates(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	l := p.ListOf(Pod{Namespace: "shop"})
	wire, err := wireName("api.example.com.shop.svc.cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() {
		w, ok := Collapse(l, wire)
		for i := range w.Len() {
			buf, ok = w.Candidate(buf[:0], i)
		}
		if !ok {
			t.Fatal("no walk")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
