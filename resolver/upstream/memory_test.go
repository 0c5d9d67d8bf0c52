package upstream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
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
	const questions = 5000
	ctx, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	ask := func(from, to int) {
		for i := from; i < to; i++ {
			asked.Go(func() { _, _ = f.Exchange(ctx, query(fmt.Sprintf("n%d.example.", i))) })
		}
		for f.Stats().Paths[UDP].InFlight < to {
			time.Sleep(time.Millisecond)
		}
	}
	ask(0, 100) // sockets, batches
	heap, stacks := memory()
	ask(100, 100+questions)
	heap2, stacks2 := memory()
	cancel()
	asked.Wait()
	perHeap, perStack := (heap2-heap)/questions, (stacks2-stacks)/questions
	if limit := uint64(2500); perHeap > limit && !raced {
		t.Errorf("%d octets of heap a question in flight, want %d at most", perHeap, limit)
	}
	t.Logf("%d octets a question in flight: %d of heap (exchange %d, of it %d attempts of %d), %d of stack",
		perHeap+perStack, perHeap, unsafe.Sizeof(exchange{}), maxAttempts, unsafe.Sizeof(attempt{}), perStack)
}
