package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// serve listens on addr and serves it until the test ends.
func serve(t testing.TB, r *Resolver, addr string, readers int) *Endpoint {
	t.Helper()
	ep, err := Listen(t.Context(), netip.MustParseAddrPort(addr), ListenOptions{Readers: readers, ReceiveBuffer: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Serve(ep); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	return ep
}

func dial(t testing.TB, network string, addr netip.AddrPort) net.Conn {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(t.Context(), network, addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// dialFrom is dial from an address of loopback.
func dialFrom(t testing.TB, network, from string, to netip.AddrPort) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.DialContext(t.Context(), network, to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// TestSockets asks over real sockets of both families and transports, on named
// and on unspecified addresses, a miss and then a hit.
func TestSockets(t *testing.T) {
	for listen, ask := range map[string]string{"127.0.0.1:0": "127.0.0.1", "[::1]:0": "::1", "0.0.0.0:0": "127.0.0.2", "[::]:0": "::1"} {
		t.Run(listen, func(t *testing.T) {
			r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
			ep := serve(t, r, listen, 2)
			addr := netip.AddrPortFrom(netip.MustParseAddr(ask), ep.Addr.Port())
			for _, network := range []string{"udp", "tcp"} {
				// A connected socket: an answer from another address than
				// the one asked would not reach it.
				conn := &dns.Conn{Conn: dial(t, network, addr)}
				for range 2 {
					q := query(network+".example.com.", dns.TypeA)
					if err := conn.WriteMsg(q); err != nil {
						t.Fatal(err)
					}
					m, err := conn.ReadMsg()
					if err != nil {
						t.Fatal(err)
					}
					if m.Id != q.Id || len(m.Answer) != 1 {
						t.Errorf("%s: got %v", network, m)
					}
				}
			}
			s := r.Stats()
			for sum(s.Duration.Counts) < 4 { // counted after the answer has left
				runtime.Gosched()
				s = r.Stats()
			}
			if s.Queries[UDP] != 2 || s.Queries[TCP] != 2 || s.Hits[HitPositive] != 2 || s.Misses != 2 || s.Responses[0] != 4 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

func sum(counts []uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// TestHitAllocatesNothing counts the allocations of a hit from socket to
// socket.
func TestHitAllocatesNothing(t *testing.T) {
	h := newHitLoop(t)
	if n := testing.AllocsPerRun(1000, h.once); n != 0 {
		t.Errorf("%v allocations per hit, want 0", n)
	}
}

func BenchmarkHit(b *testing.B) {
	h := newHitLoop(b)
	b.ReportAllocs()
	for b.Loop() {
		h.once()
	}
}

// idleReader returns the reader of a socket on loopback, without its goroutine: the
// caller makes its moves.
func idleReader(t testing.TB, r *Resolver) (*udpReader, *Endpoint) {
	t.Helper()
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ep.Close() })
	u, err := newUDPReader(r, ep.UDP[0], 1)
	if err != nil {
		t.Fatal(err)
	}
	return u, ep
}

// onlyOnce returns a function for RawConn.Read that has the reader take in a batch of
// one, and does not wait for another.
func onlyOnce(u *udpReader) func(fd uintptr) bool {
	return func(fd uintptr) bool {
		return u.read(fd) || u.errno == 0
	}
}

// hitLoop asks a cached name through a socket and lets the reader answer it
// without its goroutine, so that one round is one call.
type hitLoop struct {
	t     testing.TB
	u     *udpReader
	read  func(fd uintptr) bool
	fd    int
	query []byte
	buf   [2048]byte
}

func newHitLoop(t testing.TB) *hitLoop {
	t.Helper()
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 3600)})
	u, ep := idleReader(t, r)
	newClient(t, r, "10.0.0.1", UDP).lookup("www.example.com.")
	h := &hitLoop{t: t, u: u, read: onlyOnce(u)}
	var err error
	if h.query, err = query("www.example.com.", dns.TypeA).Pack(); err != nil {
		t.Fatal(err)
	}
	if h.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(h.fd) })
	if err := unix.Connect(h.fd, &unix.SockaddrInet4{Port: int(ep.Addr.Port()), Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *hitLoop) once() {
	if _, err := unix.Write(h.fd, h.query); err != nil {
		h.t.Fatal(err)
	}
	if err := h.u.raw.Read(h.read); err != nil {
		h.t.Fatal(err)
	}
	if n, err := unix.Read(h.fd, h.buf[:]); err != nil || n < 45 || h.buf[7] != 1 {
		h.t.Fatalf("answer %x: %v", h.buf[:max(n, 0)], err)
	}
}

// TestShutdownAnswersEverything: what the sockets had taken in when Shutdown
// was called is answered, over UDP and TCP, hits and misses.
func TestShutdownAnswersEverything(t *testing.T) {
	const n = 400
	var arrived sync.WaitGroup
	arrived.Add(n)
	release := make(chan struct{})
	f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
		if strings.HasPrefix(m.Question[0].Name, "miss") {
			arrived.Done()
			<-release
		}
		return addressOf(t, 60)(ctx, m)
	}}
	r := newTestResolver(t, f)
	ep := serve(t, r, "127.0.0.1:0", 4)
	newClient(t, r, "10.0.0.9", UDP).lookup("hit.example.com.")

	var conns []*dns.Conn
	for range 20 {
		conns = append(conns, &dns.Conn{Conn: dial(t, "udp", ep.Addr)}, &dns.Conn{Conn: dial(t, "tcp", ep.Addr)})
	}
	send := func(i int, name string) {
		if err := conns[i%len(conns)].WriteMsg(query(name, dns.TypeA)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		send(i, fmt.Sprintf("miss%d.example.com.", i))
	}
	arrived.Wait()
	for i := range n {
		send(i, "hit.example.com.")
	}
	down := make(chan error)
	go func() { down <- r.Shutdown(t.Context()) }()
	for !r.draining.Load() {
		runtime.Gosched()
	}
	close(release)
	for i := range 2 * n {
		m, err := conns[i%len(conns)].ReadMsg()
		if err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
		if len(m.Answer) != 1 {
			t.Fatalf("answer %d: %v", i, m)
		}
	}
	if err := <-down; err != nil {
		t.Error(err)
	}
	if s := r.Stats(); s.InFlight != 0 || s.Conns != 0 || s.Responses[0] != 2*n+1 {
		t.Errorf("after shutdown: %+v", s)
	}
	if err := r.Serve(ep); err == nil {
		t.Error("serves after shutdown")
	}
}

// TestShutdownDeadline: an upstream that never answers does not keep the
// process alive.
func TestShutdownDeadline(t *testing.T) {
	f := &fakeForwarder{answer: func(ctx context.Context, _ *dns.Msg) error {
		<-ctx.Done()
		return ctx.Err()
	}}
	r := newTestResolver(t, f)
	ep := serve(t, r, "127.0.0.1:0", 1)
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	for r.Stats().InFlight == 0 {
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := r.Shutdown(ctx); err == nil {
		t.Error("no error")
	}
	if m, err := conn.ReadMsg(); err != nil || m.Rcode != dns.RcodeServerFailure {
		t.Errorf("got %v, %v, want SERVFAIL", m, err)
	}
}

// TestRemoveEndpoint: the others are served on.
func TestRemoveEndpoint(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	stays, goes := serve(t, r, "127.0.0.1:0", 2), serve(t, r, "127.0.0.1:0", 2)
	for _, ep := range []*Endpoint{stays, goes} {
		for _, network := range []string{"udp", "tcp"} {
			conn := &dns.Conn{Conn: dial(t, network, ep.Addr)}
			if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.ReadMsg(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := r.Remove(t.Context(), goes); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(t.Context(), goes); err == nil {
		t.Error("removed twice")
	}
	if s := r.Stats(); s.Queries[UDP] != 2 || s.Queries[TCP] != 2 {
		t.Errorf("counts of the removed endpoint are lost: %+v", s)
	}
	conn := &dns.Conn{Conn: dial(t, "udp", stays.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.ReadMsg(); err != nil {
		t.Error(err)
	}
	ep, err := Listen(t.Context(), goes.Addr, ListenOptions{Readers: 1})
	if err != nil {
		t.Errorf("the address is not free again: %v", err)
	} else {
		_ = ep.Close()
	}
}

// TestConnectionLimits: over the limits, connections are closed at once, and
// counted.
func TestConnectionLimits(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, func(s *Settings) {
		s.Limits.Conns, s.Limits.ConnsPerClient = 4, 2
	})
	ep := serve(t, r, "0.0.0.0:0", 1)
	// refused tells whether a new connection from the address is closed.
	refused := func(from string) bool {
		t.Helper()
		conn := &dns.Conn{Conn: dialFrom(t, "tcp", from, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ep.Addr.Port()))}
		if conn.WriteMsg(query("example.com.", dns.TypeA)) != nil {
			return true
		}
		_, err := conn.ReadMsg()
		return err != nil
	}
	for i, want := range []struct {
		from    string
		refused bool
	}{{"127.0.0.1", false}, {"127.0.0.1", false}, {"127.0.0.1", true}, {"127.0.0.2", false}, {"127.0.0.3", false}, {"127.0.0.4", true}} {
		if got := refused(want.from); got != want.refused {
			t.Errorf("connection %d from %s: refused %v, want %v", i, want.from, got, want.refused)
		}
	}
	if s := r.Stats(); s.Shed[ShedConnsPer] != 1 || s.Shed[ShedConns] != 1 || s.Conns != 4 {
		t.Errorf("stats %+v", s)
	}
}

// TestListenErrors: each says what is to be done.
func TestListenErrors(t *testing.T) {
	held, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	tests := map[string]struct {
		addr netip.AddrPort
		want []string
		is   syscall.Errno
	}{
		"on no interface": {netip.MustParseAddrPort("192.0.2.1:5353"), []string{"192.0.2.1:5353", "on no interface", "intercept.mode"}, unix.EADDRNOTAVAIL},
		"in use":          {held.Addr, []string{held.Addr.String(), "another process serves"}, unix.EADDRINUSE},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			ep, err := Listen(t.Context(), tt.addr, ListenOptions{Readers: 2})
			if err == nil {
				_ = ep.Close()
				t.Fatal("no error")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not say %q", err, w)
				}
			}
			if !strings.Contains(fmt.Sprint(err), tt.is.Error()) {
				t.Errorf("error %q does not name %v", err, tt.is)
			}
		})
	}
	shared, err := Listen(t.Context(), held.Addr, ListenOptions{Readers: 2, Share: true})
	if err != nil {
		t.Errorf("sharing an address: %v", err)
	} else {
		_ = shared.Close()
	}
}

// TestSocketDrops: datagrams that the kernel dropped are seen.
func TestSocketDrops(t *testing.T) {
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1, ReceiveBuffer: 8192})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	conn := dial(t, "udp", ep.Addr)
	for range 1000 {
		_, _ = conn.Write(make([]byte, 512))
	}
	if n := socketDrops(ep.UDP[0]); n == 0 {
		t.Error("no drops seen after 1,000 datagrams that nobody read")
	}
}

// TestEveryReadRefused: a reader whose every read is refused leaves the processor to
// others, and does not keep the resolver from ending.
func TestEveryReadRefused(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	u, ep := idleReader(t, r)
	const most = 1000
	reads := 0
	u.receiveFunc = func(uintptr) {
		if reads++; reads == most { // after 20 s, or at once
			go func() { _ = ep.Close() }()
		}
		u.errno = unix.EACCES
		u.refused++
	}
	timer := time.AfterFunc(100*time.Millisecond, func() { _ = ep.UDP[0].SetReadDeadline(time.Unix(1, 0)) })
	defer timer.Stop()
	u.run() // and drains
	if reads >= most {
		t.Errorf("%d reads that were refused", reads)
	}
}

// poorlyPolled is a socket for which waiting fails.
type poorlyPolled struct {
	syscall.RawConn
	fails int
}

// Read implements [syscall.RawConn].
func (p *poorlyPolled) Read(f func(fd uintptr) bool) error {
	if p.fails--; p.fails >= 0 {
		return errors.New("not pollable")
	}
	return p.RawConn.Read(f)
}

// TestPollerThatFails: a reader that cannot wait for its socket goes on to read it, and
// waits again when it can.
func TestPollerThatFails(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	u, ep := idleReader(t, r)
	raw := &poorlyPolled{RawConn: u.raw, fails: 3}
	u.raw = raw
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		u.run()
	}()
	for i := range 10 {
		if err := conn.WriteMsg(query(fmt.Sprintf("n%d.example.", i), dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.ReadMsg(); err != nil {
			t.Fatalf("question %d: %v", i, err)
		}
	}
	if err := ep.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if raw.fails >= 0 {
		t.Errorf("%d failures were still to come", raw.fails)
	}
}
