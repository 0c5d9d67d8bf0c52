package cache

import (
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// A hit is one copy (DESIGN.md): nothing in its way allocates, whatever comes of
// the look-up.
func TestNoAllocations(t *testing.T) {
	c := newCache(t, 4<<20)
	const names = 3000
	fill(t, c, 0, names)
	var key, buf []byte
	var q dnswire.Query
	key = make([]byte, 0, dnswire.MaxNameLen+5)
	buf = make([]byte, 0, 4096)
	query := func(i int, opt *dnswire.OPT) []byte {
		return dnswire.AppendQuery(nil, 1, dnswire.FlagRD, numbered(i), dnswire.TypeA, dnswire.ClassIN, opt)
	}
	check := func(name string, want Kind, msg func(run int) []byte, now time.Duration, o ReplyOptions) {
		t.Helper()
		run := 0
		o.Now = now
		allocs := testing.AllocsPerRun(200, func() {
			m := msg(run)
			run++
			if v := dnswire.ParseQuery(m, &q); v != dnswire.Accept {
				t.Fatal(v)
			}
			key = AppendKey(key[:0], q.Name(m), q.Type, q.Class, q.DO, q.CD())
			e, kind := c.Lookup(key, now)
			if kind != want {
				t.Fatalf("%s: %v, want %v", name, kind, want)
			}
			switch kind {
			case Failed:
				f, _ := c.Failure(key, now)
				buf = dnswire.AppendError(buf[:0], m, &q, f.Rcode, dnswire.OPT{Size: udpSize, HasEDE: true, EDE: f.EDE, EDEText: f.Text})
			case Miss:
				c.Stale(key, now)
			default:
				e.PrefetchDue(now)
				buf = e.AppendReply(buf[:0], m, &q, o)
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations", name, allocs)
		}
	}
	same := func(msg []byte) func(int) []byte { return func(int) []byte { return msg } }
	now := c.Now()

	// Each name's first, second (promotion) and third hit.
	msgs := make([][]byte, names)
	for i := range msgs {
		msgs[i] = query(i, nil)
	}
	for _, nth := range []string{"first", "second", "third"} {
		check(nth+" hit", Positive, func(run int) []byte { return msgs[run] }, now, ReplyOptions{Limit: 512})
	}
	edns := query(1, &dnswire.OPT{Size: 1232, Keepalive: time.Second})
	check("hit with EDNS", Positive, same(edns), now+100*time.Second, ReplyOptions{
		Limit: 1232, Keepalive: time.Second, TrustAD: true, HasEDE: true, EDE: 29, EDEText: "synthesized",
	})
	check("miss", Miss, same(query(names, nil)), now, ReplyOptions{})

	wire := rawAnswer(numbered(names+1), 300, 3700) // 60 KB
	var r dnswire.Response
	if err := dnswire.ParseResponse(wire, &r); err != nil {
		t.Fatal(err)
	}
	c.Store(AppendKey(nil, numbered(names+1), dnswire.TypeA, dnswire.ClassIN, false, false), wire, &r, now)
	check("hit that is cut", Positive, same(query(names+1, nil)), now, ReplyOptions{Limit: 512})

	c.StoreFailure(AppendKey(nil, numbered(names+2), dnswire.TypeA, dnswire.ClassIN, false, false),
		Failure{Rcode: dnswire.RcodeServFail, EDE: dnswire.EDENoReachable, Text: "no upstream answers"}, now)
	check("failure", Failed, same(query(names+2, nil)), now, ReplyOptions{})

	c.StoreFailure(AppendKey(nil, numbered(2), dnswire.TypeA, dnswire.ClassIN, false, false), Failure{}, now+300*time.Second)
	check("stale", Stale, same(query(2, &dnswire.OPT{Size: 1232})), now+300*time.Second, ReplyOptions{Limit: 1232, Stale: true})
	check("expired", Miss, same(query(3, nil)), now+300*time.Second, ReplyOptions{})

	// A full cache's promotions push others back on probation.
	small := newCache(t, MinSize)
	fill(t, small, 0, 2000)
	kept := make([][]byte, 0, 2000)
	for i := range 2000 {
		k := AppendKey(nil, numbered(i), dnswire.TypeA, dnswire.ClassIN, false, false)
		if _, kind := small.Lookup(k, small.Now()); kind == Positive {
			kept = append(kept, k)
		}
	}
	run := 0
	if allocs := testing.AllocsPerRun(len(kept)-1, func() {
		small.Lookup(kept[run], 0)
		run++
	}); allocs != 0 {
		t.Errorf("promotion: %v allocations", allocs)
	}
	st := small.Stats()
	if st.Protected.Entries == 0 || st.Probation.Entries == 0 {
		t.Errorf("nothing was promoted or demoted: %+v", st)
	}
}

// Store costs the blob, and the node if the key is new.
func TestStoreAllocations(t *testing.T) {
	c := newCache(t, 4<<20)
	name := numbered(1)
	wire := rawAnswer(name, 300, 2)
	var r dnswire.Response
	if err := dnswire.ParseResponse(wire, &r); err != nil {
		t.Fatal(err)
	}
	key := AppendKey(nil, name, dnswire.TypeA, dnswire.ClassIN, false, false)
	if got := testing.AllocsPerRun(100, func() { c.Store(key, wire, &r, 0) }); got > 1 {
		t.Errorf("a renewal: %v allocations, want 1", got)
	}
}
