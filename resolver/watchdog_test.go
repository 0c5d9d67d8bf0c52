package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestCloseStuck: one reader of four stands still; once its socket is closed,
// every client is answered again, and shutting down does not wait for it.
func TestCloseStuck(t *testing.T) {
	release := make(chan struct{})
	var stop atomic.Bool
	block := func(s *Search) {
		s.Client = func(netip.Addr) (*search.List, bool) {
			if stop.Swap(false) {
				<-release
			}
			return nil, true
		}
	}
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, withSearch(t, block))
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 4})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Serve(ep); err != nil {
		t.Fatal(err)
	}
	if n := r.CloseStuck(time.Hour); n != 0 {
		t.Fatalf("%d sockets closed of healthy readers", n)
	}
	stop.Store(true)
	if err := (&dns.Conn{Conn: dial(t, "udp", ep.Addr)}).WriteMsg(query("stuck.example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	calls := 1
	for ; r.CloseStuck(10*time.Millisecond) == 0; calls++ {
		runtime.Gosched()
	}
	if calls < stuckCalls {
		t.Errorf("closed in call %d", calls)
	}
	for i := range 100 { // new ports: with the socket still in the group, 25 of them would wait for ever
		conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
		if err := conn.WriteMsg(query(fmt.Sprintf("n%d.example.com.", i), dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.ReadMsg(); err != nil {
			t.Fatalf("client %d: %v", i, err)
		}
	}
	if s := r.Stats(); s.Stuck != 1 {
		t.Errorf("%d sockets counted as stuck, want 1", s.Stuck)
	}
	if n := r.CloseStuck(10 * time.Millisecond); n != 0 {
		t.Errorf("%d closed a second time", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := r.Shutdown(ctx); !errors.Is(err, errStuck) {
		t.Errorf("shutdown: %v, want %v", err, errStuck)
	}
	close(release)
}

// TestStoppedProcess: a process that goes on after a while has work that is old,
// but no goroutine that stands still.
func TestStoppedProcess(t *testing.T) {
	const limit, interval = time.Second, 250 * time.Millisecond
	for name, tt := range map[string]struct {
		// began is when the work began that call i, at i*interval, sees.
		began  func(i int) time.Duration
		steps  func(i int) uint64 // of the work; nil: none
		starts int                // the first call that counts
		stuck  int                // the first call that finds it stuck; 0: none
	}{
		"idle":                       {began: func(int) time.Duration { return 0 }},
		"at work, always anew":       {began: func(i int) time.Duration { return time.Duration(i)*interval - time.Millisecond }},
		"stands still":               {began: func(int) time.Duration { return time.Millisecond }, stuck: 5},
		"gets on slowly":             {began: func(int) time.Duration { return time.Millisecond }, steps: func(i int) uint64 { return uint64(i / 3) }},
		"gets on, then stands still": {began: func(int) time.Duration { return time.Millisecond }, steps: func(i int) uint64 { return uint64(min(i, 8)) }, stuck: 13},
		"stopped, then at work":      {began: func(i int) time.Duration { return time.Duration(max(1, (i-40)*int(interval))) }},
		"stopped, stands still":      {began: func(i int) time.Duration { return time.Millisecond }, stuck: 41 + stuckCalls - 1},
		"stopped, then it waits":     {began: func(i int) time.Duration { return time.Duration(max(0, 42-i)) }},
		"starved":                    {began: func(int) time.Duration { return time.Millisecond }, starts: 100},
		"starved, stands still":      {began: func(int) time.Duration { return time.Millisecond }, starts: 10, stuck: 10 + stuckCalls - 1},
	} {
		t.Run(name, func(t *testing.T) {
			var h heartbeat
			first := 1
			if strings.HasPrefix(name, "stopped") {
				first = 41 // no call while the process was stopped
			}
			got := 0
			for i := first; i < first+20 && got == 0; i++ {
				h.since.Store(int64(tt.began(i)))
				if tt.steps != nil {
					h.steps.Store(tt.steps(i))
				}
				if h.stuck(time.Duration(i)*interval, limit, i >= tt.starts) {
					got = i
				}
			}
			if got != tt.stuck {
				t.Errorf("stuck at call %d, want %d", got, tt.stuck)
			}
		})
	}
}

// TestCanary: while one is under way, no other is sent; and it is until all locks
// that readers wait for have been its, too.
func TestCanary(t *testing.T) {
	var c canary
	c.flying.Store(true)
	for range 2 {
		if c.landed(func() {}) {
			t.Error("landed although it is under way")
		}
	}
	c.flying.Store(false)
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	for name, mu := range map[string]*sync.Mutex{"flights": &r.flights.mu, "conns": &r.conns.mu} {
		mu.Lock()
		if !c.landed(r.standInLine) {
			t.Error("none was under way, and it has not landed")
		}
		for range 1000 {
			runtime.Gosched()
		}
		if c.landed(r.standInLine) {
			t.Errorf("landed although %s is locked", name)
		}
		mu.Unlock()
		for c.flying.Load() {
			runtime.Gosched()
		}
	}
}

// TestReceived: every client's datagrams and connections are counted, whatever
// else comes in.
func TestReceived(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	ep := serve(t, r, "0.0.0.0:0", 2)
	for i, from := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"} {
		client := netip.MustParseAddr(from)
		for _, network := range []string{"udp", "tcp"} {
			for range i + 1 {
				conn := &dns.Conn{Conn: dialFrom(t, network, from, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ep.Addr.Port()))}
				if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
					t.Fatal(err)
				}
				if _, err := conn.ReadMsg(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, transport := range []Transport{UDP, TCP} {
			if n := r.Received(client, transport); n != uint64(i+1) {
				t.Errorf("%s over %v: %d received, want %d", from, transport, n, i+1)
			}
		}
	}
	if n := r.Received(netip.MustParseAddr("2001:db8::1"), UDP); n != 0 {
		t.Errorf("%d received of a client that never asked", n)
	}
}

// TestHeartbeatOfMisses: each query that may have to stand in line is a step. In a batch
// of them, the last should not be taken for one that stands still since the first.
func TestHeartbeatOfMisses(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	u, _ := idleReader(t, r)
	u.sendFunc = func(uintptr) {}
	for _, tt := range []struct {
		name string
		want uint64
	}{{"misses", batchLen}, {"hits", batchLen / stepLen}} {
		before := u.beat.steps.Load()
		u.received = batchLen
		for i := range batchLen {
			*(*unix.RawSockaddrInet4)(unsafe.Pointer(u.in.Peer(i))) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: 9, Addr: [4]byte{127, 0, 0, 1}}
			msg, err := query(fmt.Sprintf("n%d.example.", i), dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			u.in.Headers[i].Len = uint32(copy(u.in.Buffer(i), msg))
		}
		u.serve()
		u.owed.Wait()
		if got := u.beat.steps.Load() - before; got != tt.want {
			t.Errorf("%d steps of %d %s, want %d", got, batchLen, tt.name, tt.want)
		}
	}
}
