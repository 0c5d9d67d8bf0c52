//go:build !race

package ratio

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// workload is something that is done often: run does it n times; or it is a benchmark
// of another package, of what that does not export.
type workload struct {
	name  string
	run   func(n int)
	bench *benchmark
}

// names are how many names the caches have: so few that all is in the processor's own,
// whatever its sizes.
const names = 200

// calibration is a look-up as a cache makes it, of plain Go: fold a name, hash it, find
// it in a table under a lock, compare, copy an answer, patch it. Nothing in it is left
// to chance, as the standard library's maps and hashes do: with those it took 1.4 times
// as long in some processes as in others.
func calibration() workload {
	const slots, size = 4 * names, 128
	var (
		mu    sync.Mutex
		asked [names][]byte
		table = make([]byte, slots*size) // entries of a name, and an answer of 96 bytes
		used  [slots]bool
		key   [32]byte
		reply [size]byte
	)
	fold := func(q []byte) (hash uint64) {
		hash = 14695981039346656037 // FNV-1a
		for j, c := range q {
			if 'A' <= c && c <= 'Z' {
				c += 'a' - 'A'
			}
			key[j] = c
			hash = (hash ^ uint64(c)) * 1099511628211
		}
		return hash
	}
	for i := range names {
		asked[i] = name(i)
		at := fold(asked[i]) % slots
		for used[at] {
			at = (at + 1) % slots
		}
		used[at] = true
		copy(table[at*size:], asked[i])
	}
	return workload{name: "calibration", run: func(n int) {
		for i := range n {
			q := asked[i*7919%names]
			at := fold(q) % slots
			mu.Lock()
			for string(table[at*size:][:len(q)]) != string(key[:len(q)]) {
				at = (at + 1) % slots
			}
			mu.Unlock()
			copy(reply[:], table[at*size:][:size])
			binary.BigEndian.PutUint16(reply[:], uint16(i))
			binary.BigEndian.PutUint32(reply[40:], uint32(i))
		}
	}}
}

// name is a name in wire form.
func name(i int) []byte { return fmt.Appendf(nil, "\x0bhost-%06d\x04shop\x07example\x03com\x00", i) }

// answer is a response of n addresses.
func answer(name []byte, n int) []byte {
	msg := dnswire.AppendQuery(nil, 1, dnswire.FlagQR|dnswire.FlagRD|dnswire.FlagRA, name, dnswire.TypeA, dnswire.ClassIN, nil)
	dnswire.SetCounts(msg, 1, uint16(n), 0, 0)
	for i := range n {
		msg = append(msg, 0xc0, 12, 0, 1, 0, 1, 0, 0, 1, 0, 0, 4, 192, 0, 2, byte(i))
	}
	return msg
}

func key(dst, name []byte) []byte {
	return cache.AppendKey(dst, name, dnswire.TypeA, dnswire.ClassIN, false, false)
}

// workloads are what is watched.
func workloads(t *testing.T) []workload {
	t.Helper()
	c := newCache(t)
	var keys, queries [names][]byte
	var r dnswire.Response
	for i := range names {
		msg := answer(name(i), 1)
		if err := dnswire.ParseResponse(msg, &r); err != nil {
			t.Fatal(err)
		}
		keys[i] = key(nil, name(i))
		queries[i] = dnswire.AppendQuery(nil, 1, dnswire.FlagRD, name(i), dnswire.TypeA, dnswire.ClassIN, &dnswire.OPT{Size: 1232})
		if _, ok := c.Store(keys[i], msg, &r, 0); !ok {
			t.Fatal("not cached")
		}
	}
	return []workload{
		{name: "dnswire/query", run: func(n int) {
			var q dnswire.Query
			for i := range n {
				if dnswire.ParseQuery(queries[i%names], &q) != dnswire.Accept {
					panic("query refused")
				}
			}
		}},
		{name: "dnswire/response", run: func(n int) {
			msg := answer(name(1), 4)
			for range n {
				if err := dnswire.ParseResponse(msg, &r); err != nil {
					panic(err)
				}
			}
		}},
		{name: "cache/lookup", run: func(n int) {
			for i := range n {
				if _, kind := c.Lookup(keys[i*7919%names], 0); kind != cache.Positive {
					panic(kind)
				}
			}
		}},
		{name: "cache/hit", run: func(n int) {
			var q dnswire.Query
			k, buf := make([]byte, 0, 300), make([]byte, 0, 1232)
			for i := range n {
				query := queries[i*7919%names]
				dnswire.ParseQuery(query, &q)
				k = key(k[:0], q.Name(query))
				e, kind := c.Lookup(k, 2*time.Second)
				if kind != cache.Positive {
					panic(kind)
				}
				buf = e.AppendReply(buf[:0], query, &q, cache.ReplyOptions{Now: 2 * time.Second, Limit: 512})
			}
		}},
		{name: "search/walk", run: walk(t)},
		{name: "ctguard/decide", run: decide()},
		{name: "resolver/answer", bench: compile(t, "../../resolver", "BenchmarkWarmWalk")},
	}
}

func newCache(t *testing.T) *cache.Cache {
	t.Helper()
	c, err := cache.New(cache.Config{Size: 2 << 20, Zones: []cache.Zone{{Name: ".", Positive: time.Hour}}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// walk plans a search-list walk and makes its names.
func walk(t *testing.T) func(int) {
	t.Helper()
	p, err := search.New(search.Config{ClusterDomain: "cluster.local", Domains: []string{"corp.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	l := p.ListOf(search.Pod{Namespace: "shop", DNSPolicy: search.ClusterFirst})
	qname, err := search.WireName("api.example.com.shop.svc.cluster.local.")
	if err != nil {
		t.Fatal(err)
	}
	return func(n int) {
		buf := make([]byte, 0, 300)
		for range n {
			w, ok := search.Collapse(l, qname)
			if !ok {
				panic("no walk")
			}
			for i := range w.Len() {
				buf, _ = w.Candidate(buf[:0], i)
			}
		}
	}
}

// decide judges a flow of a large Service.
func decide() func(int) {
	port := ctguard.Port{Name: "dns", Port: 53}
	for i := range 50 {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i)}), 53)
		port.Endpoints = append(port.Endpoints, ctguard.Endpoint{Addr: at, Serving: true})
	}
	vip := netip.MustParseAddrPort("10.96.0.10:53")
	p := ctguard.NewPolicy(ctguard.Snapshot{Services: []ctguard.Service{{
		Name: "kube-system/kube-dns", Addrs: []netip.Addr{vip.Addr()}, Ports: []ctguard.Port{port},
	}}}, ctguard.Facts{})
	client := netip.MustParseAddrPort("10.244.1.1:40000")
	return func(n int) {
		for i := range n {
			f := ctguard.Flow{
				Proto: unix.IPPROTO_UDP,
				Orig:  ctguard.Tuple{Src: client, Dst: vip},
				Reply: ctguard.Tuple{Src: port.Endpoints[i%50].Addr, Dst: client},
			}
			if v, _ := p.Decide(f); v != ctguard.Live {
				panic(v)
			}
		}
	}
}
