package resolver

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// patience is how long the question of the other address family is waited for
// before ours is asked: longer than most upstreams take, and a small part of
// the time that a walk has. Some servers never answer AAAA (RFC 4074 section
// 4.1), and those must not cost their names A.
const patience = 250 * time.Millisecond

// fetch finds what a name, in folded wire form, has of a type for a walk that
// asks q: in the cache, or by joining or starting a flight. With either, the
// NXDOMAIN of the other address family will do, and a question of it that is
// under way is waited for a while instead of asking ours; the result tells the
// type. What it costs of Limits.InFlight is the caller's.
func (r *Resolver) fetch(ctx context.Context, name []byte, q upstream.Question, qtype uint16, either bool) result {
	key := cache.AppendKey(make([]byte, 0, len(name)+8), name, qtype, q.Class, q.DO, q.CD)
	now := r.cache.Now()
	if o, ok := r.cached(key, now); ok {
		if o.ok && !o.stale && r.prefetch.Load() && o.entry.PrefetchDue(now) {
			// With its walk's answer kept for the cluster's denials at most, and
			// nobody asking for the name itself, only walks come by here.
			r.prefetchKey(&r.flown, key, nil, now, func() upstream.Question {
				asked := named(q, name)
				asked.Type = qtype
				return asked
			})
		}
		return result{o, qtype}
	}
	var otherKey []byte
	if other := sibling(qtype); either && other != qtype {
		otherKey = cache.AppendKey(make([]byte, 0, len(name)+8), name, other, q.Class, q.DO, q.CD)
	}

	wanted := qtype
	w := &waiter{walk: make(chan outcome, 1)}
	f := &r.flights
	f.mu.Lock()
	// With mu held: what a flight finds is in the cache before it lands, so a
	// question is seen as either under way or answered.
	if otherKey != nil {
		if e, kind := r.cache.Lookup(otherKey, now); kind == cache.Negative && e.Rcode() == dnswire.RcodeNXDomain {
			f.mu.Unlock()
			return result{outcome{entry: e, ok: true}, sibling(qtype)}
		}
	}
	if ctx.Err() != nil {
		f.mu.Unlock()
		return result{outcome{failure: tookTooLong}, qtype}
	}
	fl := f.byKey[string(key)]
	if fl == nil && otherKey != nil {
		if fl = f.byKey[string(otherKey)]; fl != nil {
			qtype = sibling(qtype)
		}
	}
	start := fl == nil
	if start {
		asked := q
		asked.Name, asked.Type = name, qtype
		fl = f.add(key, netip.Addr{}, asked, nil, 0, now)
		r.running.Add(1)
	}
	if fl.stale.ok {
		o := fl.stale
		f.mu.Unlock()
		return result{o, qtype}
	}
	fl.waiters = append(fl.waiters, w)
	f.waiters++
	f.mu.Unlock()
	if start {
		go r.fly(fl, false)
	}
	var enough <-chan time.Time
	if qtype != wanted {
		t := time.NewTimer(patience)
		defer t.Stop()
		enough = t.C
	}
	select {
	case o := <-w.walk:
		return result{o, qtype}
	case <-enough:
		return r.fetch(ctx, name, q, wanted, false)
	case <-ctx.Done():
		return result{outcome{failure: tookTooLong}, qtype}
	}
}

var tookTooLong = cache.Failure{ //nolint:gochecknoglobals // a constant
	Rcode: dnswire.RcodeServFail, EDE: dnswire.EDENoReachable, Text: "search-list walk took too long",
}

// cached returns what the cache has to say about a key.
func (r *Resolver) cached(key []byte, now time.Duration) (outcome, bool) {
	e, kind := r.cache.Lookup(key, now)
	switch kind {
	case cache.Positive, cache.Negative:
		return outcome{entry: e, ok: true}, true
	case cache.Stale:
		return outcome{entry: e, ok: true, stale: true}, true
	case cache.Failed:
		f, _ := r.cache.Failure(key, now)
		return outcome{failure: f}, true
	}
	return outcome{}, false
}

// keep stores the answer to the queried name as the walk's answer, for no
// longer than life: until then, the walk would end the same way.
func (r *Resolver) keep(key []byte, q upstream.Question, res *result, life, now time.Duration) outcome {
	if !res.ok {
		return r.failed(key, res.failure, now)
	}
	msg := render(res, q, q.Name, now)
	var resp dnswire.Response
	if err := dnswire.ParseResponse(msg, &resp); err != nil || res.stale {
		return res.outcome
	}
	for i := range resp.Records {
		rec := &resp.Records[i]
		dnswire.SetTTL(msg, rec.TTLOff, min(rec.TTL(msg), wholeSeconds(life)))
	}
	return r.store(key, msg, &resp, now, life)
}

// store stores an answer of our own making, for life at most.
func (r *Resolver) store(key, msg []byte, resp *dnswire.Response, now, life time.Duration) outcome {
	e, _ := r.cache.StoreFor(key, msg, resp, now, life)
	if e.Kind() == cache.Miss {
		return r.unusable(key, now)
	}
	return outcome{entry: e, ok: true}
}

// lead stores and returns the walk's answer when another name than the queried
// one, the i-th, has won: a CNAME that leads from the one to the other, and what the
// winner has of the type. A winner that is denied for this type by a server
// that has the other has no data of it (RFC 4074 section 4.2). The error is for
// answers that grow too large by it.
func (c *course) lead(i int, winner []byte, own *result, life, now time.Duration) (outcome, error) {
	msg, err := led(c.q, render(own, c.q, winner, now), life)
	if err != nil {
		return outcome{}, err
	}
	var resp dnswire.Response
	if err := dnswire.ParseResponse(msg, &resp); err != nil {
		return outcome{}, fmt.Errorf("answer of a walk: %w", err)
	}
	var e cache.Entry
	if c.w.Expands() { // its client would not have found it
		e, _ = c.r.cache.StoreFor(c.key, msg, &resp, now, life)
	} else {
		e, _ = c.r.cache.StoreLed(c.key, msg, &resp, now, life, i)
	}
	if e.Kind() == cache.Miss {
		return c.r.unusable(c.key, now), nil
	}
	return outcome{entry: e, ok: true, stale: own.stale}, nil
}

// led makes of a message with a name's answer one with the answer to q that
// leads there.
func led(q upstream.Question, msg []byte, life time.Duration) ([]byte, error) {
	qname, _, err := dns.UnpackDomainName(q.Name, 0)
	if err != nil {
		return nil, fmt.Errorf("name of a walk: %w", err)
	}
	m := new(dns.Msg)
	if err := m.Unpack(msg); err != nil {
		return nil, fmt.Errorf("winner's answer: %w", err)
	}
	cname := &dns.CNAME{
		Hdr:    dns.RR_Header{Name: qname, Rrtype: dns.TypeCNAME, Class: q.Class, Ttl: wholeSeconds(life)},
		Target: m.Question[0].Name,
	}
	m.Question[0].Name = qname
	m.Answer = append([]dns.RR{cname}, m.Answer...)
	m.Rcode = dns.RcodeSuccess
	m.Compress = true
	packed, err := m.Pack()
	if err == nil && len(packed) > dnswire.MaxMsgLen {
		err = fmt.Errorf("%d octets", len(packed))
	}
	if err != nil {
		return nil, fmt.Errorf("pack a walk's answer: %w", err)
	}
	return packed, nil
}

// unusable is the outcome of a walk whose answer the cache does not take.
func (r *Resolver) unusable(key []byte, now time.Duration) outcome {
	return r.failed(key, cache.Failure{Rcode: dnswire.RcodeServFail, EDE: dnswire.EDEInvalidData, Text: "search-list walk: unusable answer"}, now)
}

// render returns the whole answer about a name as a message.
func render(res *result, q upstream.Question, name []byte, now time.Duration) []byte {
	query := dnswire.AppendQuery(nil, 0, dnswire.FlagRD, name, q.Type, q.Class, nil)
	var parsed dnswire.Query
	dnswire.ParseQuery(query, &parsed)
	return res.entry.AppendReply(nil, query, &parsed, cache.ReplyOptions{Now: now, Stale: res.stale})
}

// wholeSeconds rounds up, as TTLs of what ages in the cache are.
func wholeSeconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) } //nolint:gosec // capped by maxWalkTTL
