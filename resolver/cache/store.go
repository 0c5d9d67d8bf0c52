package cache

import (
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// maxKey bounds a key: a question, the bits, and what callers add.
const maxKey = 1024

// Store takes an accepted answer (dnswire.ParseResponse; if it is
// r.Unchecked, decoded once by other means) to the key's question. It returns
// the entry with which those who wait are answered, and whether that entry is
// the key's current answer from now on.
//
// What is not kept still is the newest word on the question. A positive answer
// or a proper denial with TTL 0 ends the life of the answer before it; a denial
// without an SOA that covers the name (RFC 2308 section 5) leaves a fresh
// answer alone, but an expired one is then not to be had any more, as stale
// either; a referral says nothing. All of them end a failure.
//
// Answers that no caller should pass, truncated ones, failures, and answers to
// another question, give the zero Entry.
func (c *Cache) Store(key, resp []byte, r *dnswire.Response, now time.Duration) (Entry, bool) {
	return c.store(key, resp, r, now, maxPeriod, 0)
}

// StoreFor is Store for an answer that was made of others and holds no longer than
// they do: for life at most. TTLs are whole seconds, and of a denial that is kept
// for two, half is lost by rounding down.
func (c *Cache) StoreFor(key, resp []byte, r *dnswire.Response, now, life time.Duration) (Entry, bool) {
	return c.store(key, resp, r, now, life, 0)
}

// StoreLed is StoreFor for an answer that leads from a name that does not exist to
// one that does, on behalf of a client that would have found it by itself with so
// many more questions, at least 1: where
// it does not fit a client's datagram, the reply is the name's own NXDOMAIN,
// with TC. Clients that heed TC ask again over TCP and are led; those that do
// not go on by themselves, to an answer that is shorter.
func (c *Cache) StoreLed(key, resp []byte, r *dnswire.Response, now, life time.Duration, questions int) (Entry, bool) {
	return c.store(key, resp, r, now, life, questions)
}

func (c *Cache) store(key, resp []byte, r *dnswire.Response, now, life time.Duration, led int) (Entry, bool) {
	if r.Flags&dnswire.FlagTC != 0 || len(key) > maxKey || !asks(key, resp, r) {
		return Entry{}, false
	}
	sum := r.Classify(resp)
	if sum.Kind == dnswire.Failure {
		return Entry{}, false
	}
	if !plain(resp, r, key[:r.NameLen]) {
		var err error
		if resp, r, err = repack(resp, r); err != nil {
			return Entry{}, false // what cannot be packed cannot be sent
		}
	}
	a := answer{msg: resp, r: r, kind: sum.Kind, zone: c.zones.Load().find(key[:r.NameLen]), led: led}
	most, seg := a.zone.Positive, probation
	if sum.Kind != dnswire.Positive {
		most, seg = a.zone.Negative, negative
	}
	if sum.Cacheable {
		a.life = max(0, min(time.Duration(sum.TTL)*time.Second, most, life))
	}
	blob, size := a.pack(key, now)
	shard, tag := c.hash(key)
	s := &c.shards[shard]
	kept := a.life > 0 && int64(size) <= c.size.Load()/largest
	if kept {
		c.makeRoom(seg, nodeBytes+int64(size), shard)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.failed.find(tag, key); f != nil {
		s.drop(c, f)
	}
	n := s.answers.find(tag, key)
	switch {
	case kept && n != nil:
		s.replace(c, n, seg, blob, size)
	case kept:
		n = &node{tag: tag, segment: seg}
		n.setBlob(blob, size)
		s.add(c, n)
	case n == nil || sum.Kind == dnswire.Referral:
	case sum.Cacheable || now >= (Entry{blob: n.blob}).expires():
		s.drop(c, n)
	}
	return Entry{blob: blob}, kept
}
