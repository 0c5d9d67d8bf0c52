package cache

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Readers, writers and changes of the configuration at once: every reply is to
// its question, and at the end everything is accounted.
func TestConcurrentUse(t *testing.T) {
	const (
		workers = 8
		rounds  = 4000
		names   = 3000
	)
	c := newCache(t, 512<<10)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 2))
			var r dnswire.Response
			var q dnswire.Query
			var key, reply []byte
			for round := range rounds {
				i := rnd.IntN(names)
				name := numbered(i)
				key = AppendKey(key[:0], name, dnswire.TypeA, dnswire.ClassIN, false, false)
				now := c.Now() + time.Duration(round)*10*time.Millisecond
				var e Entry
				kind := Positive
				switch op := rnd.IntN(100); {
				case op < 60:
					e, kind = c.Lookup(key, now)
				case op < 85:
					// The number of records says whose answer it is.
					msg := rawAnswer(name, uint32(rnd.IntN(40)), 1+i%3)
					if err := dnswire.ParseResponse(msg, &r); err != nil {
						t.Error(err)
						return
					}
					e, _ = c.Store(key, msg, &r, now)
				case op < 90:
					c.StoreFailure(key, Failure{Rcode: dnswire.RcodeServFail, Text: "no answer"}, now)
					kind = Miss
				case op < 93:
					e, _ = c.Stale(key, now)
				case op < 96:
					e, kind = c.Peek(key, now)
				case op < 98:
					c.Stats()
					kind = Miss
				case op < 99:
					if f, ok := c.Failure(key, now); ok && f.Text != "no answer" {
						t.Errorf("failure is %+v", f)
					}
					kind = Miss
				default:
					zones := []Zone{{Name: ".", Positive: time.Duration(1+rnd.IntN(60)) * time.Second, Stale: time.Minute}}
					if err := c.Reconfigure(Config{Size: MinSize << rnd.IntN(3), Zones: zones}); err != nil {
						t.Error(err)
					}
					kind = Miss
				}
				if e == (Entry{}) || kind == Miss || kind == Failed {
					continue
				}
				query := dnswire.AppendQuery(nil, uint16(round), dnswire.FlagRD, name, dnswire.TypeA, dnswire.ClassIN, nil)
				dnswire.ParseQuery(query, &q)
				reply = e.AppendReply(reply[:0], query, &q, ReplyOptions{Now: now, Stale: kind == Stale})
				if _, an, _, _ := dnswire.Counts(reply); int(an) != 1+i%3 || dnswire.ID(reply) != uint16(round) {
					t.Errorf("%d answers to name %d", an, i)
				}
			}
		})
	}
	wg.Wait()
	audit(t, c)
	if err := c.Reconfigure(Config{Size: MinSize, Zones: []Zone{{Name: "."}}}); err != nil {
		t.Fatal(err)
	}
	audit(t, c)
	if st := c.Stats(); st.Bytes > MinSize {
		t.Errorf("%d bytes of %d", st.Bytes, st.Size)
	}
}
