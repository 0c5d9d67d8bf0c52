package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// fakeForwarder answers questions with a function and counts them.
type fakeForwarder struct {
	mu    sync.Mutex
	asked map[string]int
	// answer fills a reply to the question, or returns an error.
	answer func(ctx context.Context, m *dns.Msg) error
}

func (f *fakeForwarder) Exchange(ctx context.Context, q upstream.Question) (upstream.Answer, error) {
	name, _, err := dns.UnpackDomainName(q.Name, 0)
	if err != nil {
		return upstream.Answer{}, err
	}
	f.mu.Lock()
	if f.asked == nil {
		f.asked = map[string]int{}
	}
	f.asked[name+" "+dns.TypeToString[q.Type]]++
	f.mu.Unlock()
	m := new(dns.Msg)
	m.SetQuestion(name, q.Type)
	m.Response, m.RecursionAvailable, m.Compress = true, true, true
	if err := f.answer(ctx, m); err != nil {
		return upstream.Answer{}, err
	}
	var a upstream.Answer
	if a.Msg, err = m.Pack(); err != nil {
		return a, err
	}
	a.Server = netip.MustParseAddrPort("192.0.2.53:53")
	return a, dnswire.ParseResponse(a.Msg, &a.Response)
}

// count returns how often a question was asked.
func (f *fakeForwarder) count(question string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[question]
}

func (f *fakeForwarder) total() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.asked {
		n += c
	}
	return n
}

// rr parses a record.
func rr(t testing.TB, format string, args ...any) dns.RR {
	r, err := dns.NewRR(fmt.Sprintf(format, args...))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// addressOf answers every A question with one record.
func addressOf(t testing.TB, ttl int) func(context.Context, *dns.Msg) error {
	return func(_ context.Context, m *dns.Msg) error {
		m.Answer = []dns.RR{rr(t, "%s %d IN A 192.0.2.1", m.Question[0].Name, ttl)}
		return nil
	}
}

func testSettings() Settings {
	return Settings{
		Limits:     Limits{InFlight: 5000, InFlightPerClient: 500, Conns: 1000, ConnsPerClient: 100},
		StaleAfter: 1200 * time.Millisecond,
		Total:      1500 * time.Millisecond,
		Prefetch:   true,
	}
}

func newTestCache(t testing.TB) *cache.Cache {
	t.Helper()
	c, err := cache.New(cache.Config{
		Size: 8 << 20,
		Zones: []cache.Zone{
			{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute, Stale: time.Hour},
			{Name: "cluster.local", Positive: 30 * time.Second, Negative: 2 * time.Second, Stale: 5 * time.Minute},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newTestResolver(t testing.TB, f Forwarder, change ...func(*Settings)) *Resolver {
	t.Helper()
	s := testSettings()
	for _, c := range change {
		c(&s)
	}
	r, err := New(Config{Cache: newTestCache(t), Forwarder: f, Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// client is a peer without a socket: it asks the pipeline directly, and keeps
// what it is answered.
type client struct {
	t       testing.TB
	r       *Resolver
	src     source
	s       *scratch
	buf     []byte // of a datagram
	answers chan *dns.Msg
}

func newClient(t testing.TB, r *Resolver, addr string, transport Transport) *client {
	c := &client{t: t, r: r, s: newScratch(&counters{}), answers: make(chan *dns.Msg, 10000)}
	c.src = source{transport: transport, replier: c, peer: netip.AddrPortFrom(netip.MustParseAddr(addr), 4000)}
	return c
}

func (c *client) owe() {}

func (c *client) reply(_ *waiter, msg []byte) { c.take(msg) }

func (c *client) take(msg []byte) {
	m := new(dns.Msg)
	if err := m.Unpack(msg); err != nil {
		c.t.Errorf("answer %x: %v", msg, err)
		return
	}
	c.answers <- m
}

// send asks a packed query, and reports whether the answer is still to come. As a
// reader does it, an answer over UDP is written over its query; what waits meets other
// octets there from then on.
func (c *client) send(query []byte) (waits bool) {
	var dst []byte
	cut := false
	if c.src.transport == UDP {
		if c.buf == nil {
			c.buf = make([]byte, datagramLen)
		}
		cut = len(query) > datagramLen
		query, dst = c.buf[:copy(c.buf, query)], c.buf[:0]
	}
	reply, waits := c.r.answer(c.s, query, cut, &c.src, c.r.cache.Now(), dst)
	if len(reply) > 0 {
		c.take(reply)
	}
	for i := range c.buf {
		c.buf[i] = 0xff
	}
	return waits
}

func (c *client) ask(m *dns.Msg) (waits bool) {
	c.t.Helper()
	b, err := m.Pack()
	if err != nil {
		c.t.Fatal(err)
	}
	return c.send(b)
}

// lookup asks for A records and returns the answer, whenever it comes.
func (c *client) lookup(name string) *dns.Msg {
	c.t.Helper()
	c.ask(query(name, dns.TypeA))
	return <-c.answers
}

// query makes a query with EDNS, so that extended errors can be seen.
func query(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(1232, false)
	return m
}

// ede returns the code of the extended error of an answer, or -1.
func ede(m *dns.Msg) int {
	if o := m.IsEdns0(); o != nil {
		for _, opt := range o.Option {
			if e, ok := opt.(*dns.EDNS0_EDE); ok {
				return int(e.InfoCode)
			}
		}
	}
	return -1
}

// end waits for all flights in the bubble.
func end(t testing.TB, r *Resolver) {
	t.Helper()
	if err := r.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSecondQueryIsHit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: addressOf(t, 60)}
		r := newTestResolver(t, f)
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		for i := range 3 {
			m := c.lookup("wWw.Example.com.")
			if len(m.Answer) != 1 || m.Question[0].Name != "wWw.Example.com." || m.Answer[0].Header().Name != "wWw.Example.com." {
				t.Fatalf("lookup %d: %v", i, m)
			}
			if want := uint32(60 - 10*i); m.Answer[0].Header().Ttl != want {
				t.Errorf("lookup %d: TTL %d, want %d", i, m.Answer[0].Header().Ttl, want)
			}
			time.Sleep(10 * time.Second)
		}
		if n := f.total(); n != 1 {
			t.Errorf("%d questions upstream, want 1", n)
		}
	})
}

func TestOneFlightForManyClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		f := &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
			<-release
			m.Answer = []dns.RR{rr(t, "%s 0 IN A 192.0.2.1", m.Question[0].Name)} // TTL 0: not cached, yet shared
			return nil
		}}
		r := newTestResolver(t, f)
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		for range 100 {
			if !c.ask(query("example.com.", dns.TypeA)) {
				t.Fatal("answered without a flight")
			}
		}
		synctest.Wait()
		if s := r.Stats(); s.InFlight != 1 || s.Waiters != 100 {
			t.Errorf("%d in flight with %d waiters, want 1 with 100", s.InFlight, s.Waiters)
		}
		close(release)
		for range 100 {
			if m := <-c.answers; len(m.Answer) != 1 || m.Answer[0].Header().Ttl != 0 {
				t.Fatalf("answer %v", m)
			}
		}
		if n := f.total(); n != 1 {
			t.Errorf("%d questions upstream, want 1", n)
		}
		c.lookup("example.com.")
		if n := f.total(); n != 2 {
			t.Errorf("TTL 0 was cached: %d questions upstream, want 2", n)
		}
		synctest.Wait()
		if s := r.Stats(); s.InFlight != 0 || s.Waiters != 0 {
			t.Errorf("%d in flight with %d waiters left", s.InFlight, s.Waiters)
		}
	})
}

// TestPressure: a burst of one client is served whole while there is room, and
// is held to its share when there is not; nobody is answered REFUSED.
func TestPressure(t *testing.T) {
	hold := func(ctx context.Context, _ *dns.Msg) error {
		<-ctx.Done()
		return ctx.Err()
	}
	tests := map[string]struct {
		limits       Limits
		greedy       int // names that one client asks
		other        int // names that another asks then
		shedGreedy   int
		shedOther    int
		counted      Shed
		wantEDEText  string
		sameQuestion bool
	}{
		"burst of 1,000 names":             {limits: testSettings().Limits, greedy: 1000, other: 10},
		"per client only under pressure":   {limits: Limits{InFlight: 100, InFlightPerClient: 10, Conns: 1, ConnsPerClient: 1}, greedy: 80, other: 10, shedGreedy: 30, counted: ShedClient},
		"others are served under pressure": {limits: Limits{InFlight: 100, InFlightPerClient: 10, Conns: 1, ConnsPerClient: 1}, greedy: 50, other: 10},
		"total":                            {limits: Limits{InFlight: 10, InFlightPerClient: 10, Conns: 1, ConnsPerClient: 1}, greedy: 10, other: 3, shedOther: 3, counted: ShedInFlight},
		"waiting is free":                  {limits: Limits{InFlight: 10, InFlightPerClient: 10, Conns: 1, ConnsPerClient: 1}, greedy: 80, sameQuestion: true},
		"but bounded":                      {limits: Limits{InFlight: 10, InFlightPerClient: 10, Conns: 1, ConnsPerClient: 1}, greedy: 90, sameQuestion: true, shedGreedy: 10, counted: ShedWaiters},
		"and not for one client alone":     {limits: Limits{InFlight: 10, InFlightPerClient: 1, Conns: 1, ConnsPerClient: 1}, greedy: 90, other: 4, sameQuestion: true, shedGreedy: 50, counted: ShedClient},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: hold}, func(s *Settings) { s.Limits = tt.limits })
				greedy, other := newClient(t, r, "10.0.0.1", UDP), newClient(t, r, "10.0.0.2", UDP)
				for i := range tt.greedy {
					if tt.sameQuestion {
						i = 0
					}
					greedy.ask(query(fmt.Sprintf("g%d.example.com.", i), dns.TypeA))
				}
				for i := range tt.other {
					other.ask(query(fmt.Sprintf("o%d.example.com.", i), dns.TypeA))
				}
				for who, c := range map[string]*client{"greedy": greedy, "other": other} {
					want := map[string]int{"greedy": tt.shedGreedy, "other": tt.shedOther}[who]
					if len(c.answers) != want {
						t.Errorf("%s: %d shed, want %d", who, len(c.answers), want)
					}
					for range len(c.answers) {
						if m := <-c.answers; m.Rcode != dns.RcodeServerFailure || ede(m) != int(dns.ExtendedErrorCodeOther) {
							t.Errorf("%s: %v, want SERVFAIL with an extended error", who, m)
						}
					}
					if got := c.s.c.shed[tt.counted].Load(); got != uint64(want) {
						t.Errorf("%s: %d counted as %v, want %d", who, got, tt.counted, want)
					}
				}
				r.cancel()
				end(t, r)
				if n := len(r.flights.perClient); n != 0 {
					t.Errorf("%d clients still charged", n)
				}
			})
		})
	}
}

// TestStale: RFC 8767. An expired answer covers a slow upstream from the stale
// timer on, and a failing one at once.
func TestStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var delay time.Duration
		var fail error
		f := &fakeForwarder{answer: func(_ context.Context, m *dns.Msg) error {
			time.Sleep(delay)
			m.Answer = []dns.RR{rr(t, "%s 60 IN A 192.0.2.1", m.Question[0].Name)}
			return fail
		}}
		r := newTestResolver(t, f)
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		c.lookup("example.com.")
		time.Sleep(61 * time.Second)

		isStale := func(step string, m *dns.Msg, start time.Time, took time.Duration) {
			t.Helper()
			if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 || m.Answer[0].Header().Ttl != 30 || ede(m) != int(dns.ExtendedErrorCodeStaleAnswer) {
				t.Errorf("%s: %v, want a stale answer", step, m)
			}
			if d := time.Since(start); d != took {
				t.Errorf("%s: took %v, want %v", step, d, took)
			}
		}
		delay = 1400 * time.Millisecond
		start := time.Now()
		isStale("slow upstream", c.lookup("example.com."), start, 1200*time.Millisecond)
		time.Sleep(100 * time.Millisecond)
		start = time.Now()
		isStale("joined after the stale timer", c.lookup("example.com."), start, 0)
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if m := c.lookup("example.com."); m.Answer[0].Header().Ttl != 60 {
			t.Errorf("the flight that went on did not renew the entry: %v", m)
		}

		time.Sleep(61 * time.Second)
		delay, fail = 300*time.Millisecond, errors.New("down")
		start = time.Now()
		isStale("failing upstream", c.lookup("example.com."), start, 300*time.Millisecond)
		n := f.total()
		start = time.Now()
		isStale("failure remembered", c.lookup("example.com."), start, 0)
		if f.total() != n {
			t.Error("a failing question was asked again at once (RFC 9520)")
		}
	})
}

// TestStaleUnderPressure: who is not admitted has a stale answer rather than none, be
// it for want of a question or of a place to wait, and also a walk's.
func TestStaleUnderPressure(t *testing.T) {
	for name, tt := range map[string]struct {
		names, each int // of another client's questions, under way
		shed        Shed
	}{
		"questions": {names: 10, each: 1, shed: ShedInFlight},
		"waiters":   {names: 1, each: 10 * waitersPerFlight, shed: ShedWaiters},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				z := zone{"example.com.": "A", "api.example.com.": "A"}
				down := false
				f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
					if down {
						<-ctx.Done()
						return ctx.Err()
					}
					return z.answer(t)(ctx, m)
				}}
				r := newTestResolver(t, f, func(s *Settings) { s.Limits.InFlight = 10 }, withSearch(t))
				c, greedy := newClient(t, r, "10.0.0.1", UDP), newClient(t, r, "10.0.0.2", UDP)
				known := []string{"example.com.", "api.example.com.shop.svc.cluster.local."}
				for _, n := range known {
					c.lookup(n)
				}
				// TTLs of 300 s are over; the cluster's stale window is not.
				time.Sleep(301 * time.Second)
				down = true
				for i := range tt.names * tt.each {
					greedy.ask(query(fmt.Sprintf("g%d.example.com.", i%tt.names), dns.TypeA))
				}
				for _, n := range append(known, "unknown.example.com.") {
					if c.ask(query(n, dns.TypeA)) {
						t.Errorf("%s waits", n)
						continue
					}
					want, data := int(dns.ExtendedErrorCodeStaleAnswer), true
					if n == "unknown.example.com." {
						want, data = int(dns.ExtendedErrorCodeOther), false
					}
					if m := <-c.answers; ede(m) != want || (len(m.Answer) > 0) != data {
						t.Errorf("%v, want extended error %d", m, want)
					}
				}
				if n, stale := c.s.c.shed[tt.shed].Load(), c.s.c.hits[HitStale].Load(); n != 1 || stale != 2 {
					t.Errorf("%d counted as %v and %d as stale, want 1 and 2", n, tt.shed, stale)
				}
				r.cancel()
				end(t, r)
			})
		})
	}
}

func TestFailures(t *testing.T) {
	tests := map[string]struct {
		answer func(context.Context, *dns.Msg) error
		rcode  int
		ede    uint16
	}{
		"no answer": {func(context.Context, *dns.Msg) error { return &upstream.Error{Reason: upstream.Timeout} }, dns.RcodeServerFailure, dns.ExtendedErrorCodeNoReachableAuthority},
		"SERVFAIL":  {func(_ context.Context, m *dns.Msg) error { m.Rcode = dns.RcodeServerFailure; return nil }, dns.RcodeServerFailure, dns.ExtendedErrorCodeOther},
		"REFUSED":   {func(_ context.Context, m *dns.Msg) error { m.Rcode = dns.RcodeRefused; return nil }, dns.RcodeServerFailure, dns.ExtendedErrorCodeOther},
		"a referral": {func(_ context.Context, m *dns.Msg) error {
			m.Ns = []dns.RR{rr(t, "com. 3600 IN NS a.gtld-servers.net.")}
			return nil
		}, dns.RcodeServerFailure, dns.ExtendedErrorCodeNoReachableAuthority},
		"an rcode of the hop's": {func(_ context.Context, m *dns.Msg) error {
			m.SetEdns0(1232, false)
			m.Rcode = dns.RcodeBadCookie
			return nil
		}, dns.RcodeServerFailure, dns.ExtendedErrorCodeOther},
		"NOTIMP": {func(_ context.Context, m *dns.Msg) error { m.Rcode = dns.RcodeNotImplemented; return nil }, dns.RcodeNotImplemented, dns.ExtendedErrorCodeOther},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeForwarder{answer: tt.answer}
				r := newTestResolver(t, f)
				defer end(t, r)
				c := newClient(t, r, "10.0.0.1", UDP)
				for range 2 {
					if m := c.lookup("example.com."); m.Rcode != tt.rcode || ede(m) != int(tt.ede) {
						t.Errorf("got %v, want rcode %s, EDE %d", m, dns.RcodeToString[tt.rcode], tt.ede)
					}
				}
				if n := f.total(); n != 1 {
					t.Errorf("asked %d times within a second, want once (RFC 9520 section 3.2)", n)
				}
				time.Sleep(6 * time.Second)
				c.lookup("example.com.")
				if n := f.total(); n != 2 {
					t.Errorf("asked %d times after the failure expired, want 2", n)
				}
			})
		})
	}
}

func TestPrefetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: addressOf(t, 100)}
		r := newTestResolver(t, f)
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)
		c.lookup("hot.example.com.")
		c.lookup("cold.example.com.")
		time.Sleep(50 * time.Second)
		c.lookup("hot.example.com.")
		time.Sleep(45 * time.Second)
		if m := c.lookup("hot.example.com."); m.Answer[0].Header().Ttl != 5 {
			t.Fatalf("not a hit: %v", m)
		}
		synctest.Wait()
		if n := f.count("hot.example.com. A"); n != 2 {
			t.Errorf("hot name asked %d times, want 2: once more before it expired", n)
		}
		if m := c.lookup("hot.example.com."); m.Answer[0].Header().Ttl != 100 {
			t.Errorf("not renewed: %v", m)
		}
		if n := f.count("cold.example.com. A"); n != 1 {
			t.Errorf("cold name asked %d times, want 1", n)
		}
	})
}
