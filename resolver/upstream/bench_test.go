package upstream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// answerer is the cheapest server that there is: it turns each query into an
// answer with one A record by patching it.
func answerer(t testing.TB) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	_ = c.SetReadBuffer(4 << 20)
	go func() {
		defer close(done)
		buf := make([]byte, 512)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			var q dnswire.Query
			if dnswire.ParseQuery(buf[:n], &q) != dnswire.Accept {
				continue
			}
			msg := append(buf[:q.QuestionEnd()], "\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x1e\x00\x04\xcb\x00\x71\x01"...)
			dnswire.SetFlags(msg, dnswire.FlagQR|dnswire.FlagRD|dnswire.FlagRA)
			dnswire.SetCounts(msg, 1, 1, 0, 0)
			_, _ = c.WriteToUDPAddrPort(msg, from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// What a question costs in allocations: the message and the layout that the
// caller gets to keep.
func TestExchangeAllocations(t *testing.T) {
	f := newForwarder(t, Config{Timeouts: patient()}, answerer(t))
	q := query("www.example.com.")
	ask := func() {
		if _, err := f.Exchange(context.Background(), q); err != nil {
			t.Error(err)
		}
	}
	ask()
	limit := 2.0
	if raced {
		limit = 8
	}
	// The average is rounded down: a socket now and then does not show.
	if got := testing.AllocsPerRun(1000, ask); got > limit {
		t.Errorf("%v allocations per exchange, want %v", got, limit)
	}
}

func BenchmarkExchange(b *testing.B) {
	for _, parallel := range []int{1, 64} {
		b.Run(fmt.Sprintf("parallel=%d", parallel), func(b *testing.B) {
			f := newForwarder(b, Config{Budget: usual}, answerer(b))
			q := query("www.example.com.")
			b.ReportAllocs()
			start := cpu(b)
			if parallel == 1 {
				for b.Loop() {
					if _, err := f.Exchange(context.Background(), q); err != nil {
						b.Fatal(err)
					}
				}
				reportCPU(b, start)
				return
			}
			b.SetParallelism(parallel / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := f.Exchange(context.Background(), q); err != nil {
						b.Error(err)
						return
					}
				}
			})
			reportCPU(b, start)
		})
	}
}

// reportCPU reports the process's CPU time per operation since start, both sides
// included.
func reportCPU(b *testing.B, start time.Duration) {
	b.Helper()
	b.ReportMetric(float64(cpu(b)-start)/float64(b.N), "cpu-ns/op")
}

// cpu returns the process's CPU time.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
