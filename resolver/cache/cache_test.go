package cache

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

func TestConfigErrors(t *testing.T) {
	root := Zone{Name: "."}
	for _, tt := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"too small", Config{Size: MinSize - 1, Zones: []Zone{root}}, "cache size 262143: less than 262144 bytes"},
		{"no root", Config{Size: MinSize, Zones: []Zone{{Name: "cluster.local"}}}, `cache: zone ".": missing, and some names are in no other`},
		{"no name", Config{Size: MinSize, Zones: []Zone{root, {Name: "a..b"}}}, `cache: zone "a..b": not a domain name`},
		{"long name", Config{Size: MinSize, Zones: []Zone{root, {Name: strings.Repeat("a.", 128)}}}, "not a domain name"},
		{"twice", Config{Size: MinSize, Zones: []Zone{root, {Name: "a.b"}, {Name: "A.B."}}}, `cache: zone "A.B.": given twice`},
		{"negative", Config{Size: MinSize, Zones: []Zone{{Name: ".", Positive: -1}}}, `cache: zone ".": positive -1ns: not between 0 and 168h0m0s`},
		{"too long", Config{Size: MinSize, Zones: []Zone{{Name: ".", StaleNoData: 169 * time.Hour}}}, `cache: zone ".": stale NODATA 169h0m0s: not between 0 and 168h0m0s`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("New: %v, want %s", err, tt.want)
			}
			c := newCache(t, 1<<20)
			fill(t, c, 0, 100)
			before := c.Stats()
			if err := c.Reconfigure(tt.cfg); err == nil {
				t.Error("Reconfigure takes it")
			}
			if diff := cmp.Diff(before, c.Stats()); diff != "" {
				t.Errorf("changed all the same: %s", diff)
			}
			if kept := fill(t, c, 100, 1); kept != 1 {
				t.Error("the caps changed all the same")
			}
		})
	}
}

func TestAppendKey(t *testing.T) {
	name := []byte("\x03WwW\x07example\x00")
	prefix := []byte("prefix")
	keys := map[string]string{}
	for _, tt := range []struct {
		qtype, qclass uint16
		do, cd        bool
		want          string
	}{
		{1, 1, false, false, "\x03www\x07example\x00\x00\x01\x00\x01\x00"},
		{1, 1, true, false, "\x03www\x07example\x00\x00\x01\x00\x01\x01"},
		{1, 1, false, true, "\x03www\x07example\x00\x00\x01\x00\x01\x02"},
		{1, 1, true, true, "\x03www\x07example\x00\x00\x01\x00\x01\x03"},
		{0x4142, 1, false, false, "\x03www\x07example\x00AB\x00\x01\x00"},
		{0x6142, 1, false, false, "\x03www\x07example\x00aB\x00\x01\x00"},
		{1, 3, false, false, "\x03www\x07example\x00\x00\x01\x00\x03\x00"},
	} {
		got := string(AppendKey(prefix, name, tt.qtype, tt.qclass, tt.do, tt.cd))
		if got != "prefix"+tt.want {
			t.Errorf("key %q, want %q", got, tt.want)
		}
		if other, twice := keys[got]; twice {
			t.Errorf("%+v has the key of %s", tt, other)
		}
		keys[got] = fmt.Sprintf("%+v", tt)
	}
}

// parse returns an accepted answer's layout.
func parse(t *testing.T, wire []byte) *dnswire.Response {
	t.Helper()
	r := new(dnswire.Response)
	if err := dnswire.ParseResponse(wire, r); err != nil {
		t.Fatal(err)
	}
	return r
}

// A key with more octets is another key for the same question.
func TestExtendedKey(t *testing.T) {
	c := newCache(t, MinSize)
	name := numbered(1)
	key := AppendKey(nil, name, dnswire.TypeA, dnswire.ClassIN, false, false)
	extended := append(bytes.Clone(key), "ns=default"...)
	for i, k := range [][]byte{key, extended} {
		wire := rawAnswer(name, 300, 1+i)
		if _, cached := c.Store(k, wire, parse(t, wire), 0); !cached {
			t.Fatal("not cached")
		}
	}
	c.StoreFailure(append(bytes.Clone(key), "other"...), Failure{}, 0)
	for i, k := range [][]byte{key, extended} {
		e, kind := c.Lookup(k, 0)
		if kind != Positive || int(e.count(dnswire.Answer)) != 1+i {
			t.Errorf("key %q: %v with %d answers", k, kind, e.count(dnswire.Answer))
		}
	}
	if _, kind := c.Lookup(extended[:len(extended)-1], 0); kind != Miss {
		t.Errorf("part of a key: %v", kind)
	}
	audit(t, c)
}

// No key is too long for the cache to refuse it safely.
func TestLongKey(t *testing.T) {
	c := newCache(t, MinSize)
	wire := rawAnswer(numbered(1), 300, 1)
	key := append(AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false), make([]byte, maxKey)...)
	if _, cached := c.Store(key, wire, parse(t, wire), 0); cached {
		t.Error("answer is cached")
	}
	c.StoreFailure(key, Failure{}, 0)
	if _, ok := c.Failure(key, 0); ok {
		t.Error("failure is cached")
	}
}

// The zero Entry, and one of another name's length, answer SERVFAIL.
func TestEntryOfAnotherQuestion(t *testing.T) {
	c := newCache(t, MinSize)
	wire := rawAnswer(numbered(1), 300, 1)
	good, _ := c.Store(AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false), wire, parse(t, wire), 0)
	for name, e := range map[string]Entry{"zero": {}, "another": good} {
		query := dnswire.AppendQuery(nil, 9, dnswire.FlagRD, []byte("\x03www\x00"), dnswire.TypeA, dnswire.ClassIN, &dnswire.OPT{Size: 1232})
		var q dnswire.Query
		dnswire.ParseQuery(query, &q)
		var m dns.Msg
		if err := m.Unpack(e.AppendReply(nil, query, &q, ReplyOptions{})); err != nil {
			t.Fatal(err)
		}
		if m.Rcode != dns.RcodeServerFailure || m.Id != 9 || len(m.Answer) != 0 || m.Question[0].Name != "www." || m.IsEdns0() == nil {
			t.Errorf("%s entry:\n%v", name, &m)
		}
	}
	zero := Entry{}
	if zero.Rcode() != dnswire.RcodeServFail || zero.Kind() != Miss || zero.TTL(0) != 0 || zero.PrefetchDue(0) {
		t.Errorf("zero entry: rcode %d, kind %v, TTL %v", zero.Rcode(), zero.Kind(), zero.TTL(0))
	}
}

// What a client gets to know of a failure.
func TestFailureIsKept(t *testing.T) {
	c := newCache(t, MinSize)
	key := AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false)
	want := Failure{Rcode: dnswire.RcodeNotImp, EDE: dnswire.EDENotReady, Text: strings.Repeat("t", maxText)}
	long := want
	long.Text += "more"
	c.StoreFailure(key, long, time.Minute)
	for _, now := range []time.Duration{time.Minute, time.Minute + firstBackoff - 1} {
		if got, ok := c.Failure(key, now); !ok || got != want {
			t.Errorf("at %v: %+v, %v", now, got, ok)
		}
	}
	if _, ok := c.Failure(key, time.Minute+firstBackoff); ok {
		t.Error("it does not end")
	}
}

// An instant that was read for a whole batch may lie before that of an answer
// stored meanwhile.
func TestInstantBeforeStored(t *testing.T) {
	c := newCache(t, MinSize)
	wire := rawAnswer(numbered(1), 300, 1)
	key := AppendKey(nil, numbered(1), dnswire.TypeA, dnswire.ClassIN, false, false)
	c.Store(key, wire, parse(t, wire), time.Minute)
	e, kind := c.Lookup(key, 50*time.Second)
	if kind != Positive {
		t.Fatal(kind)
	}
	query := dnswire.AppendQuery(nil, 9, dnswire.FlagRD, numbered(1), dnswire.TypeA, dnswire.ClassIN, nil)
	var q dnswire.Query
	dnswire.ParseQuery(query, &q)
	reply := e.AppendReply(nil, query, &q, ReplyOptions{Now: 50 * time.Second})
	if r := parse(t, reply); r.Records[0].TTL(reply) != 300 {
		t.Errorf("TTL %d", r.Records[0].TTL(reply))
	}
}

func TestKindNames(t *testing.T) {
	for kind, want := range map[Kind]string{Miss: "miss", Positive: "positive", Negative: "negative", Stale: "stale", Failed: "failure"} {
		if got := kind.String(); got != want {
			t.Errorf("kind %d is %q, want %q", kind, got, want)
		}
	}
}

// The table against a map: keys whose tags collide are told apart, and growing
// and shrinking lose nothing.
func TestTable(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var tab table
	model := map[string]*node{}
	bytesUsed := int64(0)
	newNode := func(key string, tag uint32) *node {
		var b strings.Builder
		newBlob(&b, &header{}, []byte(key), 0)
		n := &node{tag: tag}
		n.setBlob(b.String(), b.Cap())
		return n
	}
	most := 0
	for round := range 40_000 {
		id := rnd.IntN(2000)
		key, tag := fmt.Sprint("key", id), uint32(id%700)
		// Growing for the first half, shrinking for the second.
		insert := rnd.IntN(6) > 0 == (round < 20_000)
		if found := tab.find(tag, []byte(key)); found != model[key] {
			t.Fatalf("%s: found %p, want %p", key, found, model[key])
		}
		switch n := model[key]; {
		case insert && n == nil:
			n = newNode(key, tag)
			model[key] = n
			bytesUsed += tab.insert(n)
		case !insert && n != nil:
			delete(model, key)
			bytesUsed += tab.remove(n)
		}
		most = max(most, tab.n)
		if tab.n != len(model) || bytesUsed != bucketBytes*int64(len(tab.buckets)) {
			t.Fatalf("%d nodes, want %d; %d bytes for %d buckets", tab.n, len(model), bytesUsed, len(tab.buckets))
		}
	}
	if most < 1000 || len(tab.buckets) > 1024 {
		t.Errorf("at most %d nodes, at the end %d and %d buckets", most, tab.n, len(tab.buckets))
	}
	for key := range model {
		if tab.find(model[key].tag, []byte(key)) != model[key] {
			t.Errorf("%s is lost", key)
		}
	}
}

// TestStoreFor: an answer that was made of others ends with the first of them, to
// the millisecond.
func TestStoreFor(t *testing.T) {
	for _, tt := range []struct {
		life, want time.Duration
	}{
		{1990 * time.Millisecond, 1990 * time.Millisecond},
		{time.Minute, 2 * time.Second}, // the TTL
		{0, 0},
		{-time.Second, 0},
	} {
		c := newCache(t, 1<<20)
		m := new(dns.Msg)
		m.SetQuestion("a.example.", dns.TypeA).Response = true
		rr, err := dns.NewRR("a.example. 2 IN A 192.0.2.1")
		if err != nil {
			t.Fatal(err)
		}
		m.Answer = []dns.RR{rr}
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		key := AppendKey(nil, []byte("\x01a\x07example\x00"), dns.TypeA, dns.ClassINET, false, false)
		const now = time.Minute
		e, kept := c.StoreFor(key, wire, parse(t, wire), now, tt.life)
		if kept != (tt.want > 0) || e.TTL(now) != tt.want {
			t.Errorf("%v: kept %v for %v, want %v", tt.life, kept, e.TTL(now), tt.want)
		}
		if _, kind := c.Lookup(key, now+tt.want-time.Millisecond); (kind == Positive) != (tt.want > 0) {
			t.Errorf("%v: %v at the end of its life", tt.life, kind)
		}
		if _, kind := c.Lookup(key, now+tt.want); kind != Miss {
			t.Errorf("%v: %v afterwards", tt.life, kind)
		}
	}
}
