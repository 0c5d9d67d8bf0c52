package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// serve runs a server of miekg/dns on loopback, UDP and TCP on one port.
func serve(t testing.TB, handler dns.HandlerFunc) netip.AddrPort {
	t.Helper()
	for range 10 {
		pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		if err != nil {
			t.Fatal(err)
		}
		addr := pc.LocalAddr().(*net.UDPAddr).AddrPort()
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
		if err != nil { // the port is taken for TCP
			pc.Close()
			continue
		}
		var running sync.WaitGroup
		servers := []*dns.Server{{PacketConn: pc, Handler: handler}, {Listener: l, Handler: handler, MaxTCPQueries: -1}}
		for _, s := range servers {
			started := make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			running.Go(func() { _ = s.ActivateAndServe() })
			<-started
		}
		t.Cleanup(func() {
			for _, s := range servers {
				_ = s.Shutdown()
			}
			running.Wait()
		})
		return addr
	}
	t.Fatal("no port is free for both UDP and TCP")
	return netip.AddrPort{}
}

func newForwarder(t testing.TB, config Config, servers ...netip.AddrPort) *Forwarder {
	t.Helper()
	r := Route{Zones: []string{"."}}
	if len(config.Routes) == 1 {
		r = config.Routes[0]
	}
	for _, s := range servers {
		r.Servers = append(r.Servers, Server{Addr: s})
	}
	config.Routes = []Route{r}
	f, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func replyA(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 30}, A: net.IPv4(203, 0, 113, 1)}}
	_ = w.WriteMsg(m)
}

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

// patient are timeouts that a loaded machine does not reach.
func patient() Timeouts {
	return Timeouts{Hedge: 20 * time.Second, Retry: 20 * time.Second, Total: time.Minute}
}

const forgeries = 2000

// spoof answers each query after a flood of forgeries from its own address: many
// wrong ids, then the right one with another question, with QR clear, and cut
// short.
func spoof(t testing.TB) netip.AddrPort {
	t.Helper()
	return serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if _, tcp := w.LocalAddr().(*net.TCPAddr); tcp {
			replyA(w, q)
			return
		}
		forged := new(dns.Msg).SetReply(q)
		forged.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 30}, A: net.IPv4(6, 6, 6, 6)}}
		for i := range forgeries {
			forged.Id = q.Id + 1 + uint16(i)
			_ = w.WriteMsg(forged)
		}
		forged.Id = q.Id
		forged.Question = []dns.Question{{Name: "evil.example.", Qtype: dns.TypeA, Qclass: dns.ClassINET}}
		_ = w.WriteMsg(forged)
		forged.Question = q.Question
		forged.Response = false
		_ = w.WriteMsg(forged)
		forged.Response = true
		msg, _ := forged.Pack()
		_, _ = w.Write(msg[:len(msg)-1])
		replyA(w, q)
	})
}

func TestForgeriesNeverComplete(t *testing.T) {
	f := newForwarder(t, Config{Timeouts: patient()}, spoof(t))
	for i := range 20 {
		q := query(fmt.Sprintf("n%d.example.", i))
		ans, err := f.Exchange(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		checkAnswer(t, q, ans)
		m := new(dns.Msg)
		if err := m.Unpack(ans.Msg); err != nil {
			t.Fatal(err)
		}
		if a, ok := m.Answer[0].(*dns.A); !ok || !a.A.Equal(net.IPv4(203, 0, 113, 1)) {
			t.Fatalf("a forgery was taken: %v", m)
		}
	}
	st := f.Stats().Paths[UDP]
	if st.Wrong[WrongID] < forgeries || st.Wrong[WrongQuestion] == 0 || st.Wrong[WrongMessage] == 0 {
		t.Errorf("wrong messages counted: %v", st.Wrong)
	}
}

// A datagram from elsewhere does not reach a connected socket at all.
func TestForeignSource(t *testing.T) {
	local := make(chan netip.AddrPort, 1)
	release := make(chan struct{})
	s := serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		local <- w.RemoteAddr().(*net.UDPAddr).AddrPort()
		<-release
		replyA(w, q)
	})
	f := newForwarder(t, Config{Timeouts: patient()}, s)
	done := make(chan error, 1)
	go func() {
		_, err := f.Exchange(t.Context(), query("www.example."))
		done <- err
	}()
	to := <-local
	stranger, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	for range 10 {
		_, _ = stranger.Write([]byte("any answer at all"))
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if st := f.Stats().Paths[UDP]; st.Wrong != [numWrongs]uint64{} {
		t.Errorf("a stranger's datagrams were read: %v", st.Wrong)
	}
}

func TestAnswerSizes(t *testing.T) {
	for _, size := range []int{100, 500, 1150, 4000, 60000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			s := serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
				m := new(dns.Msg).SetReply(q)
				m.Compress = true
				for range size/53 + 1 { // of 53 octets each
					m.Answer = append(m.Answer, &dns.TXT{
						Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET},
						Txt: []string{strings.Repeat("x", 40)},
					})
				}
				if _, udp := w.LocalAddr().(*net.UDPAddr); udp {
					m.Truncate(int(q.IsEdns0().UDPSize()))
				}
				_ = w.WriteMsg(m)
			})
			f := newForwarder(t, Config{Timeouts: patient()}, s)
			q := query("www.example.")
			q.Type = dns.TypeTXT
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					ans, err := f.Exchange(t.Context(), q)
					if err != nil {
						t.Error(err)
						return
					}
					checkAnswer(t, q, ans)
					if len(ans.Msg) < size {
						t.Errorf("answer of %d octets, want %d", len(ans.Msg), size)
					}
					if want := size > udpSize; (ans.Transport == TCP) != want {
						t.Errorf("answer over %v", ans.Transport)
					}
				})
			}
			wg.Wait()
			if st := f.Stats(); size > udpSize && st.Paths[UDP].Fallbacks != 8 {
				t.Errorf("%d fallbacks counted, want 8", st.Paths[UDP].Fallbacks)
			}
		})
	}
}

func TestRefusedPort(t *testing.T) {
	pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	closed := pc.LocalAddr().(*net.UDPAddr).AddrPort()
	pc.Close()
	t.Run("alone", func(t *testing.T) {
		f := newForwarder(t, Config{Timeouts: patient()}, closed)
		start := time.Now()
		_, err := f.Exchange(t.Context(), query("www.example."))
		var e *Error
		if !errors.As(err, &e) || e.Reason != Network || !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("error %v, want a refused connection", err)
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("took %v, want it at once", took)
		}
	})
	t.Run("before another", func(t *testing.T) {
		f := newForwarder(t, Config{Timeouts: patient()}, closed, serve(t, replyA))
		if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil {
			t.Error(err)
		}
	})
}

// Ports change, and no socket lives for 2.5 s: the real time of one rotation.
func TestPortsChange(t *testing.T) {
	var mu sync.Mutex
	first, last := make(map[string]time.Time), make(map[string]time.Time)
	s := serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		mu.Lock()
		from := w.RemoteAddr().String()
		if first[from].IsZero() {
			first[from] = time.Now()
		}
		last[from] = time.Now()
		mu.Unlock()
		replyA(w, q)
	})
	f := newForwarder(t, Config{Timeouts: patient()}, s)
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for start := time.Now(); time.Since(start) < 4*time.Second; <-ticker.C {
		if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil {
			t.Error(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(first) < 5 || len(first) > 20 {
		t.Errorf("%d ports in 4 s, want two a second", len(first))
	}
	for from := range first {
		if age := last[from].Sub(first[from]); age > 2500*time.Millisecond {
			t.Errorf("%s was used for %v", from, age)
		}
	}
}

func TestControl(t *testing.T) {
	var mu sync.Mutex
	called := make(map[string]int)
	f := newForwarder(t, Config{
		Timeouts: patient(),
		Control: func(network, address string, c syscall.RawConn) error {
			mu.Lock()
			defer mu.Unlock()
			called[network]++
			return nil
		},
	}, serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		_, m.Truncated = w.LocalAddr().(*net.UDPAddr)
		_ = w.WriteMsg(m)
	}))
	if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff(map[string]int{"udp4": 1, "tcp4": 1}, called); diff != "" {
		t.Error(diff)
	}
}

// Nothing is left behind: no goroutine, no descriptor.
func TestNoLeaks(t *testing.T) {
	s := serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if strings.HasPrefix(q.Question[0].Name, "silent") {
			return
		}
		replyA(w, q)
	})
	fds := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	round := func() {
		for _, p := range []Protocol{Auto, TCPOnly} {
			f := newForwarder(t, Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: p}}}, s)
			var wg sync.WaitGroup
			for i := range 50 {
				wg.Go(func() { _, _ = f.Exchange(t.Context(), query(fmt.Sprintf("n%d.example.", i))) })
			}
			wg.Wait()
			wg.Go(func() { _, _ = f.Exchange(t.Context(), query("silent.example.")) })
			f.Close()
			wg.Wait()
		}
	}
	round() // descriptors that stay open, such as the poller's
	goroutines, descriptors := runtime.NumGoroutine(), fds()
	for range 20 {
		round()
	}
	// The server's goroutines for closed TCP connections end by themselves.
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for start := time.Now(); runtime.NumGoroutine() > goroutines || fds() > descriptors; <-ticker.C {
		if time.Since(start) > 10*time.Second {
			t.Fatalf("%d goroutines and %d descriptors, before %d and %d", runtime.NumGoroutine(), fds(), goroutines, descriptors)
		}
	}
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
			if parallel == 1 {
				for b.Loop() {
					if _, err := f.Exchange(context.Background(), q); err != nil {
						b.Fatal(err)
					}
				}
				reportCPU(b)
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
			reportCPU(b)
		})
	}
}

// reportCPU reports the process's CPU time per operation, both sides included.
func reportCPU(b *testing.B) {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	b.ReportMetric(float64(r.Utime.Nano()+r.Stime.Nano())/float64(b.N), "cpu-ns/op")
}
