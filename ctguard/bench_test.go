package ctguard

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/conntrack"
)

// sizes are the numbers of foreign entries. A namespace holds at most
// nf_conntrack_max of the root namespace.
var sizes = []int{10_000, 100_000}

// frontendFlows makes n flows to the frontend.
func frontendFlows(n int, endpoint string) []Flow {
	flows := make([]Flow, n)
	for i := range flows {
		flows[i] = flow(fmt.Sprintf("10.244.%d.%d:%d", 1+i/50000, i%250+1, 1024+i/250), vip4, endpoint)
	}
	return flows
}

// BenchmarkDump reads 100 flows to one frontend among foreign ones: as a sweep
// does on a kernel from 5.8 on, as on an older one, and as the library would.
func BenchmarkDump(b *testing.B) {
	for _, size := range sizes {
		n := newNamespace(b)
		n.fill(foreign(size))
		n.fill(frontendFlows(100, podA))
		for _, way := range []string{"filter", "stream"} {
			b.Run(fmt.Sprintf("%s/%d", way, size), func(b *testing.B) {
				k := n.kernel()
				k.ignoresFilter.Store(way == "stream")
				b.ReportAllocs()
				for b.Loop() {
					found := 0
					for _, err := range k.Flows(b.Context(), []Match{match(vip4)}) {
						if err != nil {
							b.Fatal(err)
						}
						found++
					}
					if found != 100 {
						b.Fatalf("%d flows", found)
					}
				}
				s := k.Stats()
				b.ReportMetric(float64(s.Bytes)/float64(s.Dumps), "netlink-B/op")
			})
		}
		b.Run(fmt.Sprintf("library/%d", size), func(b *testing.B) {
			c, err := conntrack.Dial(&netlink.Config{NetNS: n.fd})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			b.ReportAllocs()
			for b.Loop() {
				flows, err := c.Dump(nil)
				if err != nil {
					b.Fatal(err)
				}
				found := 0
				for _, f := range flows {
					if f.TupleOrig.IP.DestinationAddress == match(vip4).Dst.Addr() {
						found++
					}
				}
				if found != 100 {
					b.Fatalf("%d flows", found)
				}
			}
		})
	}
}

// BenchmarkDelete deletes flows among 100,000 foreign ones.
func BenchmarkDelete(b *testing.B) {
	n := newNamespace(b)
	n.fill(foreign(100_000))
	k := n.kernel()
	for _, count := range []int{100, 10_000} {
		flows := frontendFlows(count, podA)
		b.Run(fmt.Sprintf("tuple/%d", count), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				n.fill(flows)
				b.StartTimer()
				removed, err := k.Delete(b.Context(), flows)
				if err != nil || slices.Contains(removed, false) {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("filter/%d", count), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				n.fill(flows)
				b.StartTimer()
				if err := k.DeleteMatching(b.Context(), match(vip4, podA)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkNewsToPurge has an endpoint leave the slices, with one flow to it,
// and waits until that is gone: a flow that the guard knows, and one that a
// sweep has to find.
func BenchmarkNewsToPurge(b *testing.B) {
	for _, size := range []int{0, 10_000, 100_000, 245_000} {
		n := newNamespace(b)
		n.fill(foreign(size))
		for _, way := range []string{"known", "found"} {
			b.Run(fmt.Sprintf("%s/%d", way, size), func(b *testing.B) {
				k := n.kernel()
				purges := make(chan Purge, 1)
				g, err := New(Config{Table: k, Events: k, Host: k, OnPurge: func(p Purge) { purges <- p }})
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error)
				go func() { done <- g.Run(ctx) }()
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					b.StopTimer()
					g.Update(snapshotOf(up(podA), up(podB)))
					sweeps := g.Stats().Sweeps
					n.fill([]Flow{flow(fmt.Sprintf("10.244.%d.%d:1024", i/250%250, i%250+1), vip4, podA)})
					eventually(b, "sweep", func() bool { return g.Stats().Sweeps > sweeps })
					if way == "found" {
						g.mu.Lock()
						g.known = known{}
						g.mu.Unlock()
					}
					b.StartTimer()
					news := time.Now()
					g.Update(snapshotOf(up(podB)))
					<-purges
					took = append(took, time.Since(news))
				}
				cancel()
				<-done
				slices.Sort(took)
				for _, p := range []int{50, 99, 100} {
					d := took[min(len(took)*p/100, len(took)-1)]
					b.ReportMetric(float64(d)/1e6, fmt.Sprintf("p%d-ms", p))
				}
			})
		}
	}
}

// BenchmarkDecide judges one flow.
func BenchmarkDecide(b *testing.B) {
	p := NewPolicy(services(kubeDNS(up(podA), up(podB))), Facts{})
	f := flow(client, vip4, podA)
	b.ReportAllocs()
	for b.Loop() {
		if v, _ := p.Decide(f); v != Live {
			b.Fatal(v)
		}
	}
}
