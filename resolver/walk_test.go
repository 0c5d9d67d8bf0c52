package resolver

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// zone is a world of names for a fakeForwarder: what each has, as "A", "AAAA",
// "A AAAA", "nothing" (NODATA for all types) or "fails".
type zone map[string]string

// answer answers from the zone, after a round trip of 10 ms.
func (z zone) answer(t testing.TB) func(context.Context, *dns.Msg) error {
	return func(_ context.Context, m *dns.Msg) error {
		time.Sleep(10 * time.Millisecond)
		q := m.Question[0]
		has, ok := z[q.Name]
		switch {
		case has == "fails":
			m.Rcode = dns.RcodeServerFailure
			return nil
		case !ok:
			m.Rcode = dns.RcodeNameError
		case slices.Contains(strings.Fields(has), dns.TypeToString[q.Qtype]):
			m.Answer = []dns.RR{rr(t, "%s 300 IN %s %s", q.Name, dns.TypeToString[q.Qtype], map[uint16]string{dns.TypeA: "192.0.2.1", dns.TypeAAAA: "2001:db8::1"}[q.Qtype])}
			return nil
		}
		soa := "."
		if strings.HasSuffix(q.Name, "cluster.local.") {
			soa = "cluster.local."
		}
		m.Ns = []dns.RR{rr(t, "%s 30 IN SOA ns.dns. hostmaster. 1 7200 1800 86400 30", soa)}
		return nil
	}
}

func withSearch(t testing.TB, change ...func(*Search)) func(*Settings) {
	p, err := search.New(search.Config{ClusterDomain: "cluster.local", Domains: []string{"node.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	s := &Search{Policy: p, Collapse: true, Types: []uint16{dns.TypeA, dns.TypeAAAA}}
	for _, c := range change {
		c(s)
	}
	return func(set *Settings) { set.Search = s }
}

// short writes an answer in a line: rcode, then the answer section.
func short(m *dns.Msg) string {
	out := []string{dns.RcodeToString[m.Rcode]}
	for _, r := range m.Answer {
		f := strings.Fields(r.String())
		out = append(out, f[0]+" "+f[3]+" "+f[4])
	}
	return strings.Join(out, " | ")
}

// TestWalkMatrix has, for each shape of walk, the answers to A and AAAA asked
// at once, and every question that went upstream.
func TestWalkMatrix(t *testing.T) {
	const step1 = "api.example.com.shop.svc.cluster.local."
	tests := map[string]struct {
		zone    zone
		a, aaaa string
		asked   string // names asked upstream, those twice where a type each was needed
	}{
		"external name": {
			zone:  zone{"api.example.com.": "A AAAA"},
			a:     "NOERROR | " + step1 + " CNAME api.example.com. | api.example.com. A 192.0.2.1",
			aaaa:  "NOERROR | " + step1 + " CNAME api.example.com. | api.example.com. AAAA 2001:db8::1",
			asked: ". . cluster.local. node.example. shop.svc.cluster.local. svc.cluster.local.",
		},
		"external name without AAAA": {
			zone:  zone{"api.example.com.": "A"},
			a:     "NOERROR | " + step1 + " CNAME api.example.com. | api.example.com. A 192.0.2.1",
			aaaa:  "NOERROR | " + step1 + " CNAME api.example.com.",
			asked: ". . cluster.local. node.example. shop.svc.cluster.local. svc.cluster.local.",
		},
		"second of the list": {
			zone:  zone{"api.example.com.svc.cluster.local.": "A", "api.example.com.": "AAAA"},
			a:     "NOERROR | " + step1 + " CNAME api.example.com.svc.cluster.local. | api.example.com.svc.cluster.local. A 192.0.2.1",
			aaaa:  "NOERROR | " + step1 + " CNAME api.example.com.svc.cluster.local.",
			asked: "shop.svc.cluster.local. svc.cluster.local. svc.cluster.local.",
		},
		"the first itself": {
			zone:  zone{step1: "A"},
			a:     "NOERROR | " + step1 + " A 192.0.2.1",
			aaaa:  "NOERROR",
			asked: "shop.svc.cluster.local. shop.svc.cluster.local.",
		},
		"nowhere": {
			zone:  zone{},
			a:     "NXDOMAIN",
			aaaa:  "NXDOMAIN",
			asked: ". . cluster.local. node.example. shop.svc.cluster.local. svc.cluster.local.",
		},
		"a failure stops": {
			zone:  zone{"api.example.com.svc.cluster.local.": "fails", "api.example.com.": "A"},
			a:     "SERVFAIL",
			aaaa:  "SERVFAIL",
			asked: "shop.svc.cluster.local. svc.cluster.local. svc.cluster.local.",
		},
		"a name without addresses is left to the client": {
			zone:  zone{"api.example.com.svc.cluster.local.": "nothing", "api.example.com.": "A"},
			a:     "NXDOMAIN",
			aaaa:  "NXDOMAIN",
			asked: "shop.svc.cluster.local. svc.cluster.local. svc.cluster.local.",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: tt.zone.answer(t)}
				r := newTestResolver(t, f, withSearch(t))
				defer end(t, r)
				c4, c6 := newClient(t, r, "10.0.0.1", UDP), newClient(t, r, "10.0.0.1", UDP)
				c4.ask(query(step1, dns.TypeA))
				synctest.Wait() // the client's two queries come one after the other
				c6.ask(query(step1, dns.TypeAAAA))
				if got := short(<-c4.answers); got != tt.a {
					t.Errorf("A: got  %s\nwant %s", got, tt.a)
				}
				if got := short(<-c6.answers); got != tt.aaaa {
					t.Errorf("AAAA: got  %s\nwant %s", got, tt.aaaa)
				}
				var asked []string
				for q, n := range f.asked {
					if n != 1 {
						t.Errorf("%s: asked %d times", q, n)
					}
					domain := strings.TrimPrefix(strings.Fields(q)[0], "api.example.com.")
					asked = append(asked, cmp.Or(domain, "."))
				}
				slices.Sort(asked)
				if got := strings.Join(asked, " "); got != tt.asked {
					t.Errorf("asked upstream\n%s\nwant\n%s", got, tt.asked)
				}
				n := f.total()
				// Warm: hits, and nothing upstream.
				for c, qtype := range map[*client]uint16{c4: dns.TypeA, c6: dns.TypeAAAA} {
					if c.ask(query(step1, qtype)) {
						t.Error("a walk that was just made is walked again")
					}
				}
				if f.total() != n {
					t.Errorf("%d questions upstream when warm", f.total()-n)
				}
			})
		})
	}
}

// TestWalkClients: whose names are walked.
func TestWalkClients(t *testing.T) {
	two := 2
	pods := map[string]search.Pod{
		"10.0.0.1": {Namespace: "shop"},
		"10.0.0.2": {Namespace: "other"},
		"10.0.0.3": {Namespace: "shop", NDots: &two},
		"10.0.0.4": {Namespace: "shop", DNSPolicy: search.None, Searches: []string{"corp.example", "svc.cluster.local"}, NDots: &two},
		"10.0.0.5": {Namespace: "shop", HostNetwork: true},
		"10.0.0.6": {Namespace: "shop", DNSPolicy: search.None, Searches: []string{"svc.cluster.local"}, NDots: &two},
		"10.0.0.7": {Namespace: "shop", DNSPolicy: search.None, Searches: []string{"other.svc.cluster.local", "corp.example"}, NDots: &two},
	}
	clients := func(s *Search) {
		s.Client = func(a netip.Addr) (*search.List, bool) {
			p, ok := pods[a.String()]
			return s.Policy.ListOf(p), ok
		}
	}
	tests := map[string]struct {
		client string
		qname  string
		qtype  uint16
		do     bool
		walked bool
	}{
		"a pod's own first domain":                {client: "10.0.0.1", qname: "a.b.shop.svc.cluster.local.", walked: true},
		"another namespace's":                     {client: "10.0.0.2", qname: "a.b.shop.svc.cluster.local."},
		"ndots 2, one dot":                        {client: "10.0.0.3", qname: "a.b.shop.svc.cluster.local.", walked: true},
		"ndots 2, two dots: asked as it is first": {client: "10.0.0.3", qname: "a.b.c.shop.svc.cluster.local."},
		"a list of its own, of another namespace": {client: "10.0.0.7", qname: "a.b.other.svc.cluster.local.", walked: true},
		"a list of its own: may be a whole name":  {client: "10.0.0.4", qname: "a.b.corp.example."},
		"and by its second domain":                {client: "10.0.0.4", qname: "a.b.svc.cluster.local."},
		"a list of Services: is a namespace's":    {client: "10.0.0.6", qname: "a.b.svc.cluster.local."},
		"the host's network":                      {client: "10.0.0.5", qname: "a.b.shop.svc.cluster.local."},
		"unknown: inferred":                       {client: "10.0.9.9", qname: "a.b.shop.svc.cluster.local.", walked: true},
		"unknown, no namespace in the name":       {client: "10.0.9.9", qname: "a.b.corp.example."},
		"one label":                               {client: "10.0.0.1", qname: "a.shop.svc.cluster.local."},
		"an absolute name":                        {client: "10.0.0.1", qname: "a.b.example.com."},
		"another type":                            {client: "10.0.0.1", qname: "a.b.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		"PTR":                                     {client: "10.0.0.1", qname: "a.b.shop.svc.cluster.local.", qtype: dns.TypePTR},
		"DO":                                      {client: "10.0.0.1", qname: "a.b.shop.svc.cluster.local.", do: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: zone{"a.b.": "A", "a.b.c.": "A", "a.": "A"}.answer(t)}
				r := newTestResolver(t, f, withSearch(t, clients))
				defer end(t, r)
				c := newClient(t, r, tt.client, UDP)
				if tt.qtype == 0 {
					tt.qtype = dns.TypeA
				}
				m := query(tt.qname, tt.qtype)
				m.IsEdns0().SetDo(tt.do)
				c.ask(m)
				a := <-c.answers
				if got := len(a.Answer) == 2; got != tt.walked {
					t.Errorf("walked: %v, want %v: %s", got, tt.walked, short(a))
				}
				if n := f.total(); !tt.walked && n != 1 {
					t.Errorf("%d questions upstream, want 1", n)
				}
			})
		})
	}
}

// TestWalkAnswersArePrivate: the walk's answer is not what another client gets
// for the same question.
func TestWalkAnswersArePrivate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: zone{"a.b.": "A"}.answer(t)}
		r := newTestResolver(t, f, withSearch(t, func(s *Search) {
			s.Client = func(a netip.Addr) (*search.List, bool) {
				ns := map[string]string{"10.0.0.1": "shop", "10.0.0.2": "other"}[a.String()]
				return s.Policy.ListOf(search.Pod{Namespace: ns}), true
			}
		}))
		defer end(t, r)
		const name = "a.b.shop.svc.cluster.local."
		if m := newClient(t, r, "10.0.0.1", UDP).lookup(name); len(m.Answer) != 2 {
			t.Errorf("its own client: %s", short(m))
		}
		if m := newClient(t, r, "10.0.0.2", UDP).lookup(name); m.Rcode != dns.RcodeNameError {
			t.Errorf("another client: %s, want NXDOMAIN", short(m))
		}
	})
}

// TestWalkAnswersAreOfTheList: pods of one namespace with other lists get other
// answers to the same question, whoever asks first.
func TestWalkAnswersAreOfTheList(t *testing.T) {
	const name = "a.b.shop.svc.cluster.local."
	one := 1
	pods := map[string]search.Pod{
		"10.0.0.1": {Namespace: "shop"},
		"10.0.0.2": {Namespace: "shop", Searches: []string{"corp.example"}},
		"10.0.0.3": {Namespace: "shop", NDots: &one},
	}
	want := map[string]string{
		"10.0.0.1": "NOERROR | " + name + " CNAME a.b. | a.b. A 192.0.2.1",
		"10.0.0.2": "NOERROR | " + name + " CNAME a.b.corp.example. | a.b.corp.example. A 192.0.2.1",
		"10.0.0.3": "NXDOMAIN",
	}
	for _, order := range [][]string{{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, {"10.0.0.3", "10.0.0.2", "10.0.0.1"}, {"10.0.0.2", "10.0.0.1", "10.0.0.3"}} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeForwarder{answer: zone{"a.b.": "A", "a.b.corp.example.": "A"}.answer(t)}
			r := newTestResolver(t, f, withSearch(t, func(s *Search) {
				s.Client = func(a netip.Addr) (*search.List, bool) { return s.Policy.ListOf(pods[a.String()]), true }
			}))
			defer end(t, r)
			for range 2 {
				for _, client := range order {
					if got := short(newClient(t, r, client, UDP).lookup(name)); got != want[client] {
						t.Errorf("order %v: %s gets %s, want %s", order, client, got, want[client])
					}
				}
			}
		})
	}
}

// TestWalkTTL: a winner holds no longer than the denials of the names before
// it, and a walk that was made before is made in one round trip.
func TestWalkTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := zone{"a.b.": "A"}
		f := &fakeForwarder{answer: z.answer(t)}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		const name = "a.b.shop.svc.cluster.local."
		timed := func() (*dns.Msg, time.Duration) {
			start := time.Now()
			m := c.lookup(name)
			return m, time.Since(start)
		}
		m, d := timed()
		if d != 50*time.Millisecond {
			t.Errorf("the first walk of five names took %v, want five round trips", d)
		}
		// The cluster zone's denials hold 2 s, less the time of the walk.
		if ttl := m.Answer[0].Header().Ttl; ttl != 2 {
			t.Errorf("TTL of the CNAME %d, want 2", ttl)
		}
		if ttl := m.Answer[1].Header().Ttl; ttl != 30 {
			t.Errorf("TTL of the address %d, want the cap of the queried name's zone", ttl)
		}
		time.Sleep(3 * time.Second)
		if _, d = timed(); d != 10*time.Millisecond {
			t.Errorf("the second walk took %v, want one round trip", d)
		}
		time.Sleep(3 * time.Second)
		z["a.b.shop.svc.cluster.local."] = "A"
		if m, _ := timed(); len(m.Answer) != 1 || m.Answer[0].Header().Name != name {
			t.Errorf("a name that came into being is not seen: %s", short(m))
		}
	})
}

// TestWalkDeadline: upstreams that do not answer end a walk in time, and a
// stale answer covers it.
func TestWalkDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := zone{"a.b.": "A"}
		slow := false
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			if slow {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(700 * time.Millisecond): // a round trip below every timeout
				}
			}
			return z.answer(t)(ctx, m)
		}}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		c.lookup("a.b.shop.svc.cluster.local.")
		slow = true
		time.Sleep(10 * time.Second)
		start := time.Now()
		if m := c.lookup("x.y.shop.svc.cluster.local."); m.Rcode != dns.RcodeServerFailure {
			t.Errorf("got %s, want SERVFAIL", short(m))
		}
		if d := time.Since(start); d != 1500*time.Millisecond {
			t.Errorf("took %v, want 1.5 s", d)
		}
		start = time.Now()
		if m := c.lookup("a.b.shop.svc.cluster.local."); len(m.Answer) != 2 {
			t.Errorf("got %s, want the walk's answer", short(m))
		}
		if d := time.Since(start); d > 1200*time.Millisecond {
			t.Errorf("took %v, want 1.2 s at most", d)
		}
	})
}

// expandShop makes every client a pod of the namespace shop; only 10.0.0.2 does
// not ask for expansion.
func expandShop(s *Search) {
	s.Client = func(a netip.Addr) (*search.List, bool) {
		return s.Policy.ListOf(search.Pod{Namespace: "shop", Expand: a.String() != "10.0.0.2"}), true
	}
}

// TestExpand: a name as it is comes first, and then the list of a client whose
// namespace asks for it.
func TestExpand(t *testing.T) {
	z := zone{"db.shop.svc.cluster.local.": "A", "db.other.svc.cluster.local.": "A", "example.com.": "A", "example.com.shop.svc.cluster.local.": "A"}
	tests := map[string]struct{ client, qname, want string }{
		"a Service of its namespace":    {"10.0.0.1", "db.", "NOERROR | db. CNAME db.shop.svc.cluster.local. | db.shop.svc.cluster.local. A 192.0.2.1"},
		"of another":                    {"10.0.0.1", "db.other.", "NOERROR | db.other. CNAME db.other.svc.cluster.local. | db.other.svc.cluster.local. A 192.0.2.1"},
		"a public name is not shadowed": {"10.0.0.1", "example.com.", "NOERROR | example.com. A 192.0.2.1"},
		"nowhere":                       {"10.0.0.1", "nowhere.", "NXDOMAIN"},
		"too many dots":                 {"10.0.0.1", "a.b.c.d.e.f.", "NXDOMAIN"},
		"a namespace that does not ask": {"10.0.0.2", "db.", "NXDOMAIN"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: z.answer(t)}
				r := newTestResolver(t, f, withSearch(t, expandShop))
				defer end(t, r)
				c := newClient(t, r, tt.client, UDP)
				for range 2 {
					if got := short(c.lookup(tt.qname)); got != tt.want {
						t.Errorf("got  %s\nwant %s", got, tt.want)
					}
				}
			})
		})
	}
}

func BenchmarkWarmWalk(b *testing.B) {
	f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error { return zone{"a.b.": "A"}.answer(b)(ctx, m) }}
	r := newTestResolver(b, f, withSearch(b))
	c := newClient(b, r, "10.0.0.1", UDP)
	const name = "a.b.shop.svc.cluster.local."
	c.lookup(name)
	packed, err := query(name, dns.TypeA).Pack()
	if err != nil {
		b.Fatal(err)
	}
	now := r.cache.Now()
	buf := make([]byte, 0, 1500)
	b.ReportAllocs()
	for b.Loop() {
		reply, waits := r.answer(c.s, packed, false, &c.src, now, buf)
		if waits || len(reply) < 60 {
			b.Fatal("no hit")
		}
	}
}
