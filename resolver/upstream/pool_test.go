package upstream

import (
	"errors"
	"io"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// tcpRoutes has one route, over TCP only.
func tcpRoutes() []Route { return []Route{{Zones: []string{"."}, Protocol: TCPOnly}} }

// usage returns when each socket got its first and its last query, and how many.
type usage struct {
	first, last time.Time
	queries     int
}

func (n *fakeNet) usage() map[*fakeConn]*usage {
	all := make(map[*fakeConn]*usage)
	for _, q := range n.queries() {
		u := all[q.conn]
		if u == nil {
			u = &usage{first: q.at}
			all[q.conn] = u
		}
		u.last = q.at
		u.queries++
	}
	return all
}

func TestTCPPool(t *testing.T) {
	t.Run("age", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, healthy(ms))
			f := n.forwarder(Config{Routes: tcpRoutes()})
			if answered, _ := load(t, f, 200, time.Second); answered != 200 {
				t.Errorf("%d of 200 answered", answered)
			}
			for _, u := range n.usage() {
				if age := u.last.Sub(u.first); age > 30*time.Second {
					t.Errorf("a connection was used for %v", age)
				}
			}
			if got := len(n.usage()); got < 6 || got > 11 {
				t.Errorf("%d connections in 200 s, want one for each 20 to 30 s", got)
			}
		})
	})
	t.Run("queries", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, healthy(0))
			f := n.forwarder(Config{Routes: tcpRoutes()})
			load(t, f, 1000, ms)
			for _, u := range n.usage() {
				if u.queries > 200 {
					t.Errorf("%d queries on a connection", u.queries)
				}
			}
			if got := len(n.usage()); got != 5 {
				t.Errorf("%d connections for 1000 queries, want 5", got)
			}
			time.Sleep(ms)
			if st := f.Stats().Paths[TCP]; st.Sockets > 1 {
				t.Errorf("%d connections open, want the used ones closed", st.Sockets)
			}
		})
	})
	t.Run("idle", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, healthy(ms))
			f := n.forwarder(Config{Routes: tcpRoutes()})
			load(t, f, 3, 4*time.Second)
			if got := len(n.usage()); got != 1 {
				t.Errorf("%d connections, want one that is used again after 4 s", got)
			}
			time.Sleep(5 * time.Second)
			if st := f.Stats().Paths[TCP]; st.Sockets != 0 {
				t.Errorf("%d connections open after 5 idle seconds", st.Sockets)
			}
		})
	})
	t.Run("slow answer is not idle time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, healthy(6*time.Second))
			f := n.forwarder(Config{Routes: tcpRoutes(), Timeouts: Timeouts{Total: 8 * time.Second}})
			if answered, _ := loadFor(t, f, 1, 0, 8*time.Second); answered != 1 {
				t.Error("not answered")
			}
		})
	})
	t.Run("answers out of order", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, func(q *fakeQuery) { q.reply(time.Duration(100-10*q.nth)*ms, q.good()) })
			f := n.forwarder(Config{Routes: tcpRoutes()})
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					q := query(string(rune('a'+i)) + ".example.")
					ans, err := f.Exchange(t.Context(), q)
					if err != nil {
						t.Error(err)
						return
					}
					checkAnswer(t, q, ans)
				})
			}
			wg.Wait()
			if got := len(n.usage()); got != 1 {
				t.Errorf("%d connections, want all in one pipeline", got)
			}
			ids := make(map[uint16]bool)
			for _, q := range n.queries() {
				if ids[q.Id] {
					t.Errorf("id %d used twice on one connection", q.Id)
				}
				ids[q.Id] = true
			}
		})
	})
	t.Run("a crowd gets more connections, but few", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, healthy(200*ms))
			f := n.forwarder(Config{Routes: tcpRoutes()})
			var wg sync.WaitGroup
			for range 400 { // so few that no connection comes to its last question
				wg.Go(func() { _, _ = f.Exchange(t.Context(), query("www.example.")) })
			}
			wg.Wait()
			if got := len(n.usage()); got != maxPooled {
				t.Errorf("%d connections, want %d", got, maxPooled)
			}
		})
	})
	t.Run("closed by the server while idle", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, func(q *fakeQuery) {
				q.reply(0, q.good())
				q.refuse(time.Second, io.EOF)
			})
			f := n.forwarder(Config{Routes: tcpRoutes()})
			if answered, slowest := load(t, f, 10, 2*time.Second); answered != 10 || slowest != 0 {
				t.Errorf("%d of 10 answered, slowest %v", answered, slowest)
			}
		})
	})
	t.Run("pooled connection closed before the first octet", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newFakeNet(t, func(q *fakeQuery) {
				if q.nth == 1 { // the second query meets the close
					q.refuse(0, io.EOF)
					return
				}
				q.reply(0, q.good())
			})
			f := n.forwarder(Config{Routes: tcpRoutes()})
			if answered, slowest := load(t, f, 10, ms); answered != 10 || slowest != 0 {
				t.Errorf("%d of 10 answered, slowest %v", answered, slowest)
			}
		})
	})
}

func TestRetireSockets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dead := make(map[*fakeConn]bool)
		n := newFakeNet(t, func(q *fakeQuery) {
			if !dead[q.conn] {
				q.reply(100*ms, q.good())
			}
		})
		f := n.forwarder(Config{Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		load(t, f, 20, 100*ms)

		// What is in flight on one socket must come by another.
		var wg sync.WaitGroup
		ports := make(map[netip.AddrPort]bool)
		for _, c := range n.conns {
			ports[c.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()] = true
			dead[c] = true
		}
		before := len(n.queries())
		start := time.Now()
		for range 3 {
			wg.Go(func() {
				if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		lost := len(n.queries()) - before
		stuck := 0
		for _, q := range n.queries()[before:] {
			if dead[q.conn] {
				stuck++
			}
		}
		if lost != 3 || stuck == 0 {
			t.Fatalf("%d queries sent, %d on sockets to retire", lost, stuck)
		}
		none := f.RetireSockets(func(_, remote netip.AddrPort) bool { return remote == addr(2) })
		if none != 0 {
			t.Errorf("retired %d sockets to another server", none)
		}
		retired := f.RetireSockets(func(local, remote netip.AddrPort) bool { return ports[local] && remote == addr(1) })
		if retired == 0 {
			t.Error("retired no socket")
		}
		wg.Wait()
		if took := time.Since(start); took != 100*ms {
			t.Errorf("answered after %v, want the 100 ms that a new socket takes", took)
		}
		if sent := len(n.queries()) - before; sent != 3+stuck {
			t.Errorf("%d sent, want %d and %d again", sent, 3, stuck)
		}
		for _, q := range n.queries()[before+3:] {
			if dead[q.conn] {
				t.Error("sent again over a retired socket")
			}
		}
		if again := f.RetireSockets(func(local, _ netip.AddrPort) bool { return ports[local] }); again != 0 {
			t.Errorf("retired %d sockets twice", again)
		}
	})
}

// A socket that its age has retired already, while a question is in flight on it,
// is no exception.
func TestRetireAgedSocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dead := make(map[*fakeConn]bool)
		n := newFakeNet(t, func(q *fakeQuery) {
			if !dead[q.conn] {
				q.reply(ms, q.good())
			}
		})
		f := n.forwarder(Config{
			Routes:   []Route{{Zones: []string{"."}, Protocol: UDPOnly}},
			Timeouts: Timeouts{Hedge: 2700 * ms, Retry: 2800 * ms, Total: 3000 * ms},
		})
		opened := time.Now()
		load(t, f, 20, 10*ms)
		ours := make(map[netip.AddrPort]bool)
		for _, c := range n.conns {
			ours[c.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()] = true
			dead[c] = true
		}
		before := len(n.queries())
		done := make(chan error)
		go func() {
			_, err := f.Exchange(t.Context(), query("www.example."))
			done <- err
		}()
		time.Sleep(udpAge + ms - time.Since(opened))
		if sent := n.queries()[before:]; len(sent) != 1 || !dead[sent[0].conn] {
			t.Fatalf("%d queries sent", len(sent))
		}
		for _, want := range []int{1, 0} {
			if retired := f.RetireSockets(func(local, _ netip.AddrPort) bool { return ours[local] }); retired != want {
				t.Errorf("retired %d sockets, want %d", retired, want)
			}
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if took := time.Since(opened); took != udpAge+2*ms {
			t.Errorf("answered after %v, want %v: a new socket takes 1 ms", took, udpAge+2*ms)
		}
	})
}

// The original's answer is as good as the second's, if it comes.
func TestRetiredSocketMayAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, on(healthy(50*ms), blackHole))
		f := n.forwarder(Config{})
		done := make(chan error)
		go func() {
			_, err := f.Exchange(t.Context(), query("www.example."))
			done <- err
		}()
		synctest.Wait()
		if n := f.RetireSockets(func(_, _ netip.AddrPort) bool { return true }); n != 1 {
			t.Fatalf("retired %d sockets", n)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A second question goes to a socket that nobody has used.
func TestSecondQuestionsUseNewSockets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, func(q *fakeQuery) {
			if q.Question[0].Name != "lost.example." {
				q.reply(ms, q.good())
			}
		})
		f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		load(t, f, 100, 10*ms)
		_, err := f.Exchange(t.Context(), query("lost.example."))
		var e *Error
		if !errors.As(err, &e) || e.Reason != Timeout {
			t.Fatalf("error %v, want a timeout", err)
		}
		seen := make(map[*fakeConn]bool)
		var asked int
		for _, q := range n.queries() {
			if q.Question[0].Name == "lost.example." {
				if asked > 0 && seen[q.conn] {
					t.Errorf("query %d went over a used socket", asked)
				}
				asked++
			}
			seen[q.conn] = true
		}
		if asked != 3 {
			t.Errorf("asked %d times, want 3", asked)
		}
	})
}

// The two questions of one lookup do not share a socket that has not answered
// yet: both would be lost on a dead endpoint, and two packets at once on a new
// 5-tuple are what the connection tracker drops one of.
func TestFirstQuestionsDoNotShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms))
		f := n.forwarder(Config{})
		var wg sync.WaitGroup
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			wg.Go(func() {
				q := query("www.example.")
				q.Type = qtype
				_, _ = f.Exchange(t.Context(), q)
			})
		}
		wg.Wait()
		if got := len(n.usage()); got != 2 {
			t.Errorf("%d sockets for A and AAAA, want 2", got)
		}
		load(t, f, 100, ms)
		if got := len(n.usage()); got != 2 {
			t.Errorf("%d sockets after 100 ms, want the same 2", got)
		}
	})
}

// There is a bound on sockets, whatever happens.
func TestSocketLimit(t *testing.T) {
	for name, p := range map[string]Protocol{"udp": UDPOnly, "tcp": TCPOnly} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, blackHole)
				f := n.forwarder(Config{Budget: Budget{100, 100}, Routes: []Route{{Zones: []string{"."}, Protocol: p}}})
				most := 0
				var wg sync.WaitGroup
				for range 3000 {
					wg.Go(func() { _, _ = f.Exchange(t.Context(), query("www.example.")) })
					time.Sleep(ms)
					st := f.Stats().Paths[map[Protocol]Transport{UDPOnly: UDP, TCPOnly: TCP}[p]]
					most = max(most, st.Sockets)
				}
				wg.Wait()
				if most > maxConns {
					t.Errorf("%d sockets open, want at most %d", most, maxConns)
				}
			})
		})
	}
}

func TestStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, byTransport(func(q *fakeQuery) {
			switch q.Question[0].Name {
			case "cut.example.":
				cutShort(q)
			case "bad.example.":
				q.reply(0, q.rcode(dns.RcodeServerFailure))
			case "late.example.":
				q.reply(1530*ms, q.good())
			default:
				q.reply(3*ms, q.good())
			}
		}, healthy(0)))
		f := n.forwarder(Config{Routes: []Route{{Zones: []string{"."}, Protocol: Auto}}})
		for _, name := range []string{"www", "cut", "bad", "late"} {
			_, _ = f.Exchange(t.Context(), query(name+".example."))
		}
		time.Sleep(200 * ms)
		st := f.Stats()
		udp, tcp := st.Paths[UDP], st.Paths[TCP]
		if udp.Server != addr(1) || udp.Transport != UDP || tcp.Transport != TCP {
			t.Fatalf("paths %v %v and %v %v", udp.Server, udp.Transport, tcp.Server, tcp.Transport)
		}
		if udp.Queries != 4 || tcp.Queries != 1 || udp.Fallbacks != 1 {
			t.Errorf("%d UDP and %d TCP queries, %d fallbacks, want 4, 1 and 1", udp.Queries, tcp.Queries, udp.Fallbacks)
		}
		if udp.Failures[Rcode] != 1 || udp.Failures[Timeout] != 1 || udp.Late != 1 {
			t.Errorf("%d error answers, %d timeouts, %d late answers, want one each", udp.Failures[Rcode], udp.Failures[Timeout], udp.Late)
		}
		if st.Denied != [numKinds]uint64{Hedge: 1, Retry: 1} {
			t.Errorf("denied %v, want one each", st.Denied)
		}
		var sum uint64
		for _, n := range udp.Latency.Buckets {
			sum += n
		}
		if sum != 4 || udp.Latency.Sum != 1533*ms || udp.Latency.Buckets[4] != 1 {
			t.Errorf("histogram %v", udp.Latency)
		}
		if !udp.Up || !udp.EDNS || udp.InFlight != 0 {
			t.Errorf("up %v, EDNS %v, %d in flight", udp.Up, udp.EDNS, udp.InFlight)
		}
	})
}
