package resolver

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// BenchmarkServe is our part of a hit: what lies between recvmmsg and sendmmsg, by
// datagrams in a batch, clients that take turns in it, and EDNS. It reports the
// median of the batches, which other programs on the machine hardly move.
func BenchmarkServe(b *testing.B) {
	const names = 1000
	for _, bm := range []struct {
		batch, clients int
		edns           bool
	}{{1, 1, false}, {16, 1, false}, {64, 1, false}, {64, 1, true}, {64, 8, false}} {
		b.Run(fmt.Sprintf("batch=%d,clients=%d,edns=%v", bm.batch, bm.clients, bm.edns), func(b *testing.B) {
			r := newTestResolver(b, &fakeForwarder{answer: addressOf(b, 3600)})
			u, _ := idleReader(b, r)
			client := newClient(b, r, "10.0.0.1", UDP)
			queries := make([][]byte, names)
			for i := range queries {
				name := fmt.Sprintf("host-%08d.names.bench.example.", i)
				m := new(dns.Msg).SetQuestion(name, dns.TypeA)
				if bm.edns {
					m.SetEdns0(1232, false)
				}
				client.ask(m)
				<-client.answers
				var err error
				if queries[i], err = m.Pack(); err != nil {
					b.Fatal(err)
				}
			}
			u.sendFunc = func(uintptr) {}
			u.received = bm.batch
			for i := range bm.batch {
				from := (*unix.RawSockaddrInet4)(unsafe.Pointer(u.in.Peer(i)))
				*from = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: uint16(1 + i%4), Addr: [4]byte{10, 99, 0, byte(2 + i%bm.clients)}}
			}
			next, n := 0, 0
			var took []time.Duration
			for b.Loop() {
				for i := range bm.batch {
					u.in.Headers[i].Len = uint32(copy(u.in.Buffer(i), queries[next]))
					next = (next + 7919) % names
				}
				begin := time.Now()
				u.serve()
				took = append(took, time.Since(begin))
				n += bm.batch
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2])/float64(bm.batch), "median-ns/query")
			b.ReportMetric(0, "ns/op")
			if got := u.c.hits[HitPositive].Load(); got != uint64(n) {
				b.Errorf("%d hits of %d", got, n)
			}
		})
	}
}
