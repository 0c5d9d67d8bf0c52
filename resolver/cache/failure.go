package cache

import (
	"encoding/binary"
	"strings"
	"time"
)

// Failure is how a question failed: what clients that ask it again meanwhile
// are told.
type Failure struct {
	Rcode uint16 // usually SERVFAIL
	EDE   uint16 // RFC 8914
	Text  string // for people; kept up to 64 octets
}

// The back-off of RFC 9520 section 3.2: at least 1 s, at most 5 min. 5 s is
// when the next try of most libcs comes, which then should reach an upstream.
const (
	firstBackoff = time.Second
	maxBackoff   = 5 * time.Second
	// repeatWithin is how soon after its end a failure must come again to
	// count as the same one; a while longer than clients go on trying.
	repeatWithin = 30 * time.Second
	maxText      = 64 // as much as dnswire sends
)

// StoreFailure remembers that the question with this key failed at now, for 1 s
// and, as long as the failure repeats, for twice as long each time, up to 5 s.
// A failure during that time changes nothing. Answers are not touched, but for
// an expired one being served stale meanwhile.
func (c *Cache) StoreFailure(key []byte, f Failure, now time.Duration) {
	if len(key) > maxKey {
		return
	}
	shard, tag := c.hash(key)
	s := &c.shards[shard]
	life := s.backoff(tag, key, now)
	if life == 0 {
		return
	}
	text := f.Text[:min(len(f.Text), maxText)]
	var b strings.Builder
	newBlob(&b, &header{stored: now, life: life, flags: f.Rcode, kind: Failed}, key, 2+len(text))
	var p [2]byte
	binary.BigEndian.PutUint16(p[:], f.EDE)
	b.Write(p[:])
	b.WriteString(text)
	c.makeRoom(failures, nodeBytes+int64(b.Cap()), shard)

	n := &node{tag: tag, segment: failures}
	n.setBlob(b.String(), b.Cap())
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.failed.find(tag, key); old != nil {
		s.drop(c, old)
	}
	s.add(c, n)
}

// backoff returns for how long a failure at now is to be remembered; 0 if an
// earlier one is active.
func (s *shard) backoff(tag uint32, key []byte, now time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.failed.find(tag, key)
	if n == nil {
		return firstBackoff
	}
	switch e := (Entry{blob: n.blob}); {
	case now < e.expires():
		return 0
	case now < e.expires()+repeatWithin:
		return min(2*e.life(), maxBackoff)
	default:
		return firstBackoff
	}
}

// Failure returns the failure that is active for the key, if there is one. An
// answer may be there as well: see Lookup.
func (c *Cache) Failure(key []byte, now time.Duration) (Failure, bool) {
	i, tag := c.hash(key)
	s := &c.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.failing(tag, key, now)
	if n == nil {
		return Failure{}, false
	}
	e := Entry{blob: n.blob}
	body := e.body()
	return Failure{Rcode: e.flags(), EDE: be16(body, 0), Text: body[2:]}, true
}
