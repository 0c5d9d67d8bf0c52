package resolver

import (
	"bytes"
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// flight is one question under way, with all clients that wait for it. Its
// fields are guarded by flights.mu but for key, question and walk, which do
// not change.
type flight struct {
	key      string
	question upstream.Question
	client   netip.Addr   // who is charged for it; invalid for prefetches
	walk     *search.Walk // if the question is a walk's
	cost     int          // of Limits.InFlight
	// began is when its first client's query came: what passes before the
	// goroutine runs is part of the client's time.
	began   time.Duration
	waiters []*waiter
	// stale, once stale.ok, is what clients that come now are answered
	// with: the stale timer has run out (RFC 8767 section 5).
	stale  outcome
	landed bool
}

// waiter is a client that waits for a flight to land, or a walk.
type waiter struct {
	walk chan outcome // a walk's; capacity 1, and nothing else is set: no client is charged

	src     source
	q       dnswire.Query
	query   []byte // header and question as sent
	arrived time.Duration
	c       *counters
}

// newWaiter returns the waiter of a query. The query and the local address lie
// in the reader's buffers, which the next batch overwrites: it has copies.
func newWaiter(s *scratch, msg []byte, src *source, now time.Duration, c *counters) *waiter {
	w := &waiter{src: *src, q: s.q, query: bytes.Clone(msg[:s.q.QuestionEnd()]), arrived: now, c: c}
	w.src.local = bytes.Clone(src.local)
	return w
}

// flights is the table of questions under way, and the admission to it.
type flights struct {
	mu        sync.Mutex
	byKey     map[string]*flight
	perClient map[netip.Addr]load
	taken     int // of limits.InFlight
	ahead     int // questions that walks ask ahead; they take from nobody
	waiters   int
	limits    Limits
}

// load is what a client has: flights that it is charged for, and queries that
// wait.
type load struct{ flights, waiters int }

// charge adds to a client's load; the caller holds mu.
func (f *flights) charge(client netip.Addr, flights, waiters int) {
	if !client.IsValid() {
		return
	}
	l := f.perClient[client]
	l.flights += flights
	l.waiters += waiters
	if l == (load{}) {
		delete(f.perClient, client)
		return
	}
	f.perClient[client] = l
}

// What of Limits.InFlight is taken for a question, and for a walk: itself and the
// question that it has under way, one after the other. So a walk that has begun
// is never short of a question, and what walks cost is known before they begin.
const (
	costQuestion = 1
	costWalk     = 2
)

func cost(w *search.Walk) int {
	if w != nil {
		return costWalk
	}
	return costQuestion
}

// waitersPerFlight bounds all waiters by a multiple of Limits.InFlight:
// waiting on a question that is under way costs no question, but it does cost
// memory (about 0.4 KiB).
const waitersPerFlight = 8

// admit says whether client may start one more flight of that cost. Fairness
// between clients is enforced only under pressure, from half of the total on: a
// proxy with 500 clusters rightly asks 1,000 names at once when it starts.
func (f *flights) admit(client netip.Addr, cost int) (Shed, bool) {
	switch {
	case f.taken+min(cost, f.limits.InFlight) > f.limits.InFlight: // alone, all are admitted
		return ShedInFlight, false
	case f.taken >= f.limits.InFlight/2 && f.perClient[client].flights >= f.limits.InFlightPerClient:
		return ShedClient, false
	}
	return 0, true
}

// admitWaiter says whether one more query of the client may wait, by the same
// rule: or one client, with few slow names, could keep all others from asking.
func (f *flights) admitWaiter(client netip.Addr) (Shed, bool) {
	most := f.limits.InFlight * waitersPerFlight
	switch {
	case f.waiters >= most:
		return ShedWaiters, false
	case f.waiters >= most/2 && f.perClient[client].waiters >= f.limits.InFlightPerClient*waitersPerFlight:
		return ShedClient, false
	}
	return 0, true
}

// spare reports whether n more can be asked that nobody has to wait for. It gives
// way to clients: nothing of it starts in the upper half of the total.
func (f *flights) spare(n int) bool { return f.taken+f.ahead+n <= f.limits.InFlight/2 }

// beginAhead makes room for a walk to ask n names ahead, if there is.
func (f *flights) beginAhead(n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.spare(n) {
		return false
	}
	f.ahead += n
	return true
}

// endAhead says that one of them is answered, or was none.
func (f *flights) endAhead() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ahead--
}

// add enters a new flight for the key, whose cost has been admitted or is part
// of what is taken already; the caller holds mu.
func (f *flights) add(key []byte, client netip.Addr, q upstream.Question, w *search.Walk, cost int, now time.Duration) *flight {
	fl := &flight{key: string(key), client: client, question: q, cost: cost, began: now}
	f.taken += cost
	if w != nil {
		fl.walk = w.Clone()
	}
	f.byKey[fl.key] = fl
	f.charge(client, 1, 0)
	return fl
}

// land takes the flight out of the table and returns who waits for it.
func (f *flights) land(fl *flight) []*waiter {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl.landed = true
	delete(f.byKey, fl.key)
	f.taken -= fl.cost
	f.charge(fl.client, -1, 0)
	return f.take(fl)
}

// take returns and forgets the flight's waiters; the caller holds mu.
func (f *flights) take(fl *flight) []*waiter {
	ws := fl.waiters
	fl.waiters = nil
	f.waiters -= len(ws)
	for _, w := range ws {
		f.charge(w.src.peer.Addr(), 0, -1)
	}
	return ws
}

// question copies the question out of a query.
func question(s *scratch, msg []byte) upstream.Question {
	return upstream.Question{
		Name: dnswire.AppendFolded(nil, s.q.Name(msg)), Type: s.q.Type, Class: s.q.Class, DO: s.q.DO, CD: s.q.CD(),
	}
}

// join makes the query wait for the flight of its question, starting it if
// there is none. Where that is not admitted, or the stale timer has run out
// already, it appends the answer: what is not admitted is not to be had in time
// either, and a stale answer does for it.
func (r *Resolver) join(s *scratch, msg []byte, src *source, w *search.Walk, now time.Duration, dst []byte) (reply []byte, waits bool) {
	s.c.misses.Add(1)
	client := src.peer.Addr()
	f := &r.flights
	f.mu.Lock()
	fl := f.byKey[string(s.key)]
	if fl != nil && fl.stale.ok {
		e := fl.stale.entry
		f.mu.Unlock()
		return r.hit(s, msg, src, w, e, cache.Stale, now, dst), false
	}
	start := fl == nil
	reason, ok := f.admitWaiter(client)
	if ok && start {
		reason, ok = f.admit(client, cost(w))
	}
	if !ok {
		f.mu.Unlock()
		if e, stale := r.cache.Stale(s.key, now); stale {
			return r.hit(s, msg, src, w, e, cache.Stale, now, dst), false
		}
		return r.shed(s, msg, dst, reason), false
	}
	if start {
		fl = f.add(s.key, client, question(s, msg), w, cost(w), now)
		r.running.Add(1)
	}
	c := &r.flown
	if s.listGiven {
		c = s.c // Explain's: nobody asked
	}
	fl.waiters = append(fl.waiters, newWaiter(s, msg, src, now, c))
	f.waiters++
	f.charge(client, 0, 1)
	src.replier.owe()
	f.mu.Unlock()
	if start {
		go r.fly(fl, false)
	}
	return dst, true
}

// startPrefetch starts a flight that nobody waits for, to renew an entry that
// is about to expire; w is its walk, if it is one's.
func (r *Resolver) startPrefetch(s *scratch, msg []byte, w *search.Walk, now time.Duration) {
	r.prefetchKey(s.c, s.key, w, now, func() upstream.Question { return question(s, msg) })
}

// prefetchKey is startPrefetch for a key and its question. Nothing starts while the
// question is failing, nor in the upper half of the total.
func (r *Resolver) prefetchKey(c *counters, key []byte, w *search.Walk, now time.Duration, question func() upstream.Question) {
	if _, failing := r.cache.Failure(key, now); failing {
		return
	}
	f := &r.flights
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.byKey[string(key)]; ok || r.draining.Load() || !f.spare(cost(w)) {
		return
	}
	c.prefetches.Add(1)
	r.running.Add(1)
	go r.fly(f.add(key, netip.Addr{}, question(), w, cost(w), now), true)
}

// fly works on one flight until it has landed. What was stored between a
// client's look into the cache and its flight's start answers it, but not a
// prefetch, which is about the very entry that it would find.
func (r *Resolver) fly(fl *flight, prefetch bool) {
	defer r.running.Done()
	key := []byte(fl.key)
	now := r.cache.Now()
	if !prefetch {
		if e, kind := r.cache.Lookup(key, now); kind == cache.Positive || kind == cache.Negative {
			r.answerAll(fl, r.flights.land(fl), now, outcome{entry: e, ok: true})
			return
		}
	}
	waited := now - fl.began
	if e, ok := r.cache.Stale(key, now); ok {
		timer := time.AfterFunc(time.Duration(r.staleAfter.Load())-waited, func() { r.answerStale(fl, e) })
		defer timer.Stop()
	}
	var o outcome
	if fl.walk != nil {
		ctx, cancel := context.WithTimeout(r.ctx, upstream.Left(time.Duration(r.total.Load()), waited))
		o = r.walk(ctx, key, fl.question, fl.walk)
		cancel()
	} else {
		q := fl.question
		q.Waited = waited
		o = r.ask(r.ctx, key, q)
	}
	r.answerAll(fl, r.flights.land(fl), r.cache.Now(), o)
}

// answerStale answers those who wait with the stale entry, while the flight
// goes on: the client response timer of RFC 8767 section 5.
func (r *Resolver) answerStale(fl *flight, e cache.Entry) {
	o := outcome{entry: e, ok: true, stale: true}
	f := &r.flights
	f.mu.Lock()
	if fl.landed {
		f.mu.Unlock()
		return
	}
	fl.stale = o
	waiters := f.take(fl)
	f.mu.Unlock()
	r.answerAll(fl, waiters, r.cache.Now(), o)
}

// ask asks the forwarder and stores what comes back. A failure is remembered
// apart from answers (RFC 9520) and covered by a stale entry where there is
// one (RFC 8767 section 4: a failure is no reason to lose what we knew).
func (r *Resolver) ask(ctx context.Context, key []byte, q upstream.Question) outcome {
	if r.withoutAAAA(q) {
		return r.noAAAA(key, q)
	}
	ans, err := (*r.forwarder.Load()).Exchange(ctx, q)
	now := r.cache.Now()
	var failure cache.Failure
	switch {
	case err != nil:
		failure = failureOf(err)
	case ans.Response.Classify(ans.Msg).Kind == dnswire.Referral:
		failure = cache.Failure{Rcode: dnswire.RcodeServFail, EDE: dnswire.EDENoReachable, Text: "upstream " + ans.Server.String() + " does not recurse"}
	case ans.Response.Rcode == dnswire.RcodeNoError || ans.Response.Rcode == dnswire.RcodeNXDomain:
		e, _ := r.cache.Store(key, ans.Msg, &ans.Response, now)
		if e.Kind() != cache.Miss {
			return outcome{entry: e, ok: true}
		}
		failure = cache.Failure{Rcode: dnswire.RcodeServFail, EDE: dnswire.EDEInvalidData, Text: "upstream " + ans.Server.String() + ": unusable answer"}
	default:
		failure = failureAnswer(&ans)
	}
	return r.failed(key, failure, now)
}

// failed remembers a failure, and covers it by a stale entry.
func (r *Resolver) failed(key []byte, failure cache.Failure, now time.Duration) outcome {
	r.cache.StoreFailure(key, failure, now)
	if e, ok := r.cache.Stale(key, now); ok {
		return outcome{entry: e, ok: true, stale: true}
	}
	return outcome{failure: failure}
}

// answerAll answers a flight's waiters with the same outcome.
func (r *Resolver) answerAll(fl *flight, waiters []*waiter, now time.Duration, o outcome) {
	if len(waiters) == 0 {
		return
	}
	buf := r.buffers.Get().(*[]byte)
	for _, w := range waiters {
		if w.walk != nil {
			w.walk <- o
			continue
		}
		if o.stale {
			w.c.hits[HitStale].Add(1)
		}
		// Room for the length that goes before a message over TCP.
		msg, rcode := r.encode(w.c, (*buf)[:2], w.query, &w.q, fl.walk, w.src.transport, now, &o)
		w.c.response(rcode)
		w.src.replier.reply(w, msg[2:])
		w.c.duration(now-w.arrived, 1)
		*buf = msg
	}
	r.buffers.Put(buf)
}
