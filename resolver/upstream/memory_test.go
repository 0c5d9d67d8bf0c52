package upstream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// What a question in flight takes of memory, its goroutine's stack included:
// limits.inFlight of them at a time are what a dead upstream costs.
func TestMemoryInFlight(t *testing.T) {
	silent, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	f := newForwarder(t, Config{Timeouts: patient()}, silent.LocalAddr().(*net.UDPAddr).AddrPort())
	memory := func() (heap, stacks uint64) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, m.StackInuse
	}
	questions := 5000
	if raced {
		questions = 200
	}
	ctx, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	var ended atomic.Int64
	ask := func(from, to int) {
		for i := from; i < to; i++ {
			asked.Go(func() {
				_, _ = f.Exchange(ctx, query(fmt.Sprintf("n%d.example.", i)))
				ended.Add(1)
			})
		}
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		for f.Stats().Paths[UDP].InFlight < to {
			if <-ticker.C; ended.Load() > 0 {
				t.Fatalf("%d questions ended before all were asked", ended.Load())
			}
		}
	}
	ask(0, 100) // sockets, batches
	heap, stacks := memory()
	ask(100, 100+questions)
	heap2, stacks2 := memory()
	cancel()
	asked.Wait()
	perHeap, perStack := (heap2-heap)/uint64(questions), (stacks2-stacks)/uint64(questions)
	if limit := uint64(2500); perHeap > limit && !raced {
		t.Errorf("%d octets of heap a question in flight, want %d at most", perHeap, limit)
	}
	t.Logf("%d octets a question in flight: %d of heap (exchange %d, of it %d attempts of %d), %d of stack",
		perHeap+perStack, perHeap, unsafe.Sizeof(exchange{}), maxAttempts, unsafe.Sizeof(attempt{}), perStack)
}
