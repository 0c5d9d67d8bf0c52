package upstream

import (
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

// Under timeouts, hedges and late answers, everybody gets the answer to his own
// question: memory that is used again is never reached by an old answer.
func TestAnswersFindTheirQuestions(t *testing.T) {
	s := serve(t, func(w dns.ResponseWriter, q *dns.Msg) {
		delay := time.Duration(q.Id%40) * time.Millisecond
		if _, tcp := w.LocalAddr().(*net.TCPAddr); tcp { // one after the other
			delay /= 8
		}
		<-time.After(delay)
		replyA(w, q)
	})
	for name, p := range map[string]Protocol{"udp": UDPOnly, "tcp": TCPOnly} {
		t.Run(name, func(t *testing.T) {
			f := newForwarder(t, Config{
				Budget:   Budget{Hedge: 100, Retry: 100},
				Timeouts: Timeouts{Hedge: 10 * time.Millisecond, Retry: 15 * time.Millisecond, Total: 30 * time.Millisecond},
				Routes:   []Route{{Zones: []string{"."}, Protocol: p}},
			}, s)
			var wg sync.WaitGroup
			for i := range 16 {
				wg.Go(func() {
					for j := range 50 {
						q := query(fmt.Sprintf("n%d.of%d.example.", j, i))
						if ans, err := f.Exchange(t.Context(), q); err == nil {
							checkAnswer(t, q, ans)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
