package resolver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// Explanation tells how a client's look-up of a name goes. Its JSON is what
// dnsguard explain prints.
type Explanation struct {
	Name   string `json:"name"`
	Type   string `json:"type"`
	Client string `json:"client,omitempty"`
	// Source tells where the search list came from: "pod", "namespace",
	// "inferred" (from the name) or "none".
	Source string   `json:"listSource"`
	List   []string `json:"searchList"`
	NDots  int      `json:"ndots"`
	// Steps are the names in the order in which the client's libc tries
	// them, up to the one that ends its walk.
	Steps []ExplainedStep `json:"steps"`
	// Asked is the first of them, and Answer what a query for it is answered
	// with now.
	Asked  string   `json:"asked"`
	Walked bool     `json:"walked"` // the walk is finished for the client
	Rcode  string   `json:"rcode"`
	Answer []string `json:"answer"`
	Error  string   `json:"extendedError,omitempty"`
	// Notes tell what else there is to know of the list and the walk.
	Notes []string `json:"notes,omitempty"`
}

// ExplainedStep is one name of a walk.
type ExplainedStep struct {
	Name   string           `json:"name"`
	States []ExplainedState `json:"states"`
	Step   string           `json:"step"` // what follows from them
}

// ExplainedState is what a name has of a type.
type ExplainedState struct {
	Type   string `json:"type"`
	State  string `json:"state"`
	Cached bool   `json:"cached"`
	TTL    int    `json:"ttlSeconds"`
}

// QuestionError tells that what Explain was asked is no question.
type QuestionError struct{ Problem string }

func (e *QuestionError) Error() string { return e.Problem }

// ParseQuestion returns a name in wire form and a type of records by its number. The
// error is a *QuestionError.
func ParseQuestion(name, qtype string) (wire []byte, t uint16, err error) {
	t, ok := dns.StringToType[strings.ToUpper(qtype)]
	if !ok {
		return nil, 0, &QuestionError{fmt.Sprintf("%q is no type of records", qtype)}
	}
	switch t {
	case dns.TypeNone, dns.TypeOPT, dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB, dns.TypeTKEY, dns.TypeTSIG, dns.TypeReserved:
		return nil, 0, &QuestionError{fmt.Sprintf("%s is no type of records that are looked up", dns.TypeToString[t])}
	}
	wire, err = search.WireName(name)
	if err != nil {
		return nil, 0, &QuestionError{err.Error()}
	}
	return wire, t, nil
}

// Explain looks a name up as a client would, through the cache, and tells each
// step. The client is known by its address or, if that is not valid, by its
// namespace; with neither, a list can only be read off the name. Names with a
// final dot are absolute: libcs do not search for them.
func (r *Resolver) Explain(ctx context.Context, name, qtype string, client netip.Addr, namespace string) (*Explanation, error) {
	wire, t, err := ParseQuestion(name, qtype)
	if err != nil {
		return nil, err
	}
	s := r.walks.search.Load()
	if s == nil {
		return nil, errors.New("search lists are not configured")
	}
	x := &Explanation{Name: name, Type: dns.TypeToString[t]}
	list := r.explainList(s, x, wire, client, namespace)
	if list == nil && x.Source == "namespace" {
		return nil, &QuestionError{fmt.Sprintf("%q is no namespace", namespace)}
	}
	names := [][]byte{wire}
	if list != nil {
		x.NDots = list.NDots
		for _, d := range list.Domains {
			x.List = append(x.List, present(d))
		}
		if !strings.HasSuffix(name, ".") && !list.Inferred {
			names = list.Names(nil, wire)
		}
	}
	walk, planned := r.explainPlan(names[0], t, client, list)
	gap := len(names) // behind it, libcs go on differently: a name before was too long
	if planned {
		names, gap = nil, walk.Len()
		for i := range walk.Len() {
			if c, ok := walk.Candidate(nil, i); ok {
				names = append(names, c)
			} else {
				gap = min(gap, len(names))
			}
		}
	}
	var service *serviceAbove
	if planned {
		service = r.serviceAbove(&walk)
	}
	for i, n := range names {
		last := i == len(names)-1
		explained, step := r.explainName(ctx, n, t, last)
		x.Steps = append(x.Steps, explained)
		switch step {
		case search.Stop:
			planned = false // left to the client
			continue
		case search.Win, search.Fail:
		default:
			continue
		}
		x.Walked = planned
		switch {
		case walk.Expands() && i == 0, !walk.Expands() && i >= gap && !last:
			x.Walked = false
		case planned && service.abroad(n) && r.explainService(ctx, x, t, service):
			x.Walked = false
		}
		break
	}
	if list != nil && len(list.Domains) > 0 && s.Policy.InCluster(list.Domains[0]) && !s.Policy.HasNodeDomains() {
		x.Notes = append(x.Notes, "search.domains is empty: if kubelet appends domains of the node to the list, they are missing here")
	}
	return x, r.explainAnswer(ctx, x, names[0], t, client, list)
}

// explainPlan returns the walk that the pipeline begins when the client asks for a
// name, if any.
func (r *Resolver) explainPlan(name []byte, t uint16, client netip.Addr, list *search.List) (search.Walk, bool) {
	s := newScratch(new(counters))
	s.q.Type, s.q.NameLen = t, len(name)
	s.key = append(s.key, name...)
	s.list, s.listGiven = list, true
	return r.walks.plan(s, client, r.cache.Now())
}

// explainService notes why a walk does not leave the cluster, if it does not.
func (r *Resolver) explainService(ctx context.Context, x *Explanation, t uint16, s *serviceAbove) bool {
	q := upstream.Question{Name: s.name, Type: t, Class: dnswire.ClassIN}
	if res := r.fetch(ctx, s.name, q, t, true); res.state() == search.NXDomain {
		return false
	}
	x.Notes = append(x.Notes, present(s.name)+" exists, and the first name may be a pod of it: a walk that leaves the cluster is left to the client")
	return true
}

func (r *Resolver) explainList(s *Search, x *Explanation, wire []byte, client netip.Addr, namespace string) *search.List {
	switch {
	case client.IsValid():
		x.Client = client.String()
		if s.Client != nil {
			if l, known := s.Client(client); known {
				x.Source = "pod"
				return l
			}
		}
	case namespace != "":
		x.Source = "namespace"
		return s.Policy.ListOf(search.Pod{Namespace: namespace})
	}
	if l := s.Policy.Infer(wire); l != nil {
		x.Source = "inferred"
		return l
	}
	x.Source = "none"
	return nil
}

// explainName asks one name for both address families, or for the one type.
func (r *Resolver) explainName(ctx context.Context, name []byte, t uint16, last bool) (x ExplainedStep, step search.Step) {
	q := upstream.Question{Name: name, Type: t, Class: dnswire.ClassIN}
	states := [2]search.State{}
	x.Name = present(name)
	for i, each := range []uint16{t, sibling(t)} {
		if i == 1 && each == t {
			states[1] = states[0]
			break
		}
		now := r.cache.Now()
		_, kind := r.cache.Peek(cache.AppendKey(nil, name, each, q.Class, false, false), now)
		res := r.fetch(ctx, name, q, each, false)
		states[i] = res.state()
		e := ExplainedState{Type: dns.TypeToString[each], State: stateName(states[i], &res), Cached: kind != cache.Miss}
		if res.ok {
			e.TTL = int(max(0, res.entry.TTL(r.cache.Now())).Seconds())
		}
		x.States = append(x.States, e)
	}
	if step = search.Decide(states[0], states[1], last); r.withoutAAAA(q) {
		step = search.DecideByOther(states[1])
	}
	switch step {
	case search.Win:
		x.Step = "the look-up ends here"
	case search.Fail:
		x.Step = "the look-up fails here"
	case search.Stop:
		x.Step = "glibc goes on, musl ends here"
	default:
		x.Step = "not here"
	}
	return x, step
}

func stateName(s search.State, res *result) string {
	switch s {
	case search.Data:
		return "data"
	case search.NoData:
		return "NODATA"
	case search.NXDomain:
		return "NXDOMAIN"
	}
	return "failure: " + res.failure.Text
}

// explainAnswer asks the pipeline the client's first question.
func (r *Resolver) explainAnswer(ctx context.Context, x *Explanation, name []byte, t uint16, client netip.Addr, list *search.List) error {
	x.Asked = present(name)
	answers := make(explainer, 1)
	src := source{transport: TCP, replier: answers, peer: netip.AddrPortFrom(client, 0)}
	query := dnswire.AppendQuery(nil, 0, dnswire.FlagRD, name, t, dnswire.ClassIN, &dnswire.OPT{Size: udpSize})
	s := newScratch(new(counters))
	reply, waits := r.answerFor(s, query, &src, list)
	if waits {
		select {
		case reply = <-answers:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	m := new(dns.Msg)
	if err := m.Unpack(reply); err != nil {
		return fmt.Errorf("unpack our own answer: %w", err)
	}
	x.Rcode = dns.RcodeToString[m.Rcode]
	for _, rr := range m.Answer {
		x.Answer = append(x.Answer, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	if o := m.IsEdns0(); o != nil {
		for _, opt := range o.Option {
			if e, ok := opt.(*dns.EDNS0_EDE); ok {
				x.Error = extendedError(e)
			}
		}
	}
	return nil
}

// extendedError returns an error's code and its text, or what the code means where
// the error has none (RFC 8914 section 4).
func extendedError(e *dns.EDNS0_EDE) string {
	text := cmp.Or(e.ExtraText, dns.ExtendedErrorCodeToString[e.InfoCode])
	return strings.TrimSuffix(fmt.Sprintf("%d %s", e.InfoCode, text), " ")
}

// answerFor is answer for a client whose list is given.
func (r *Resolver) answerFor(s *scratch, query []byte, src *source, list *search.List) ([]byte, bool) {
	s.list, s.listGiven = list, true
	return r.answer(s, query, false, src, r.cache.Now(), nil)
}

// explainer takes the answer of a flight.
type explainer chan []byte

func (e explainer) owe() {}

func (e explainer) reply(_ *waiter, msg []byte) { e <- append([]byte(nil), msg...) }

// present unpacks a wire-form name.
func present(wire []byte) string {
	name, _, err := dns.UnpackDomainName(wire, 0)
	if err != nil {
		return fmt.Sprintf("%x", wire)
	}
	return name
}
