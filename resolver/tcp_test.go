package resolver

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// pipeConn serves one end of an in-memory connection and returns the other.
func pipeConn(t *testing.T, r *Resolver) (net.Conn, *tcpConn) {
	t.Helper()
	ours, theirs := net.Pipe()
	c := newTCPConn(r, ours, netip.MustParseAddrPort("10.0.0.1:4000"), &r.framed)
	if _, ok := r.conns.admit(c, nil); !ok {
		t.Fatal("connection not admitted")
	}
	go func() {
		c.run()
		r.conns.remove(c)
	}()
	t.Cleanup(func() { _ = theirs.Close() })
	return theirs, c
}

// frame packs a message with its length.
func frame(t testing.TB, m *dns.Msg) []byte {
	t.Helper()
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func readMsg(conn io.Reader) (*dns.Msg, error) {
	var n [2]byte
	if _, err := io.ReadFull(conn, n[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(n[:]))
	if _, err := io.ReadFull(conn, b); err != nil {
		return nil, err
	}
	m := new(dns.Msg)
	return m, m.Unpack(b)
}

func mustRead(t *testing.T, conn io.Reader) *dns.Msg {
	t.Helper()
	m, err := readMsg(conn)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func mustWrite(t *testing.T, conn io.Writer, b []byte) {
	t.Helper()
	if _, err := conn.Write(b); err != nil {
		t.Fatal(err)
	}
}

// TestTCPOutOfOrder: a slow question does not hold up the next one on the same
// connection.
func TestTCPOutOfOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			if m.Question[0].Name == "slow.example.com." {
				time.Sleep(time.Second)
			}
			return addressOf(t, 60)(ctx, m)
		}}
		r := newTestResolver(t, f)
		conn, _ := pipeConn(t, r)
		pipelined := append(frame(t, query("slow.example.com.", dns.TypeA)), frame(t, query("fast.example.com.", dns.TypeA))...)
		mustWrite(t, conn, pipelined)
		for _, want := range []string{"fast.example.com.", "slow.example.com."} {
			if m := mustRead(t, conn); m.Question[0].Name != want || len(m.Answer) != 1 {
				t.Errorf("got %v, want %s", m, want)
			}
		}
		_ = conn.Close()
		end(t, r)
	})
}

// TestTCPSplitWrites: a length and a message may come in any pieces (RFC 7766
// section 8).
func TestTCPSplitWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
		conn, _ := pipeConn(t, r)
		for range 3 {
			for _, b := range frame(t, query("example.com.", dns.TypeA)) {
				mustWrite(t, conn, []byte{b})
				time.Sleep(10 * time.Millisecond)
			}
			if m := mustRead(t, conn); len(m.Answer) != 1 {
				t.Errorf("got %v", m)
			}
		}
		_ = conn.Close()
		end(t, r)
	})
}

// TestTCPCloses: who is silent, trickles, sends what is no DNS or takes no
// answers loses the connection, when it should.
func TestTCPCloses(t *testing.T) {
	tests := map[string]struct {
		open int // other connections
		do   func(t *testing.T, conn net.Conn)
		want time.Duration
	}{
		"idle":                   {do: func(*testing.T, net.Conn) {}, want: idleTimeout},
		"idle in a crowd":        {open: 8, do: func(*testing.T, net.Conn) {}, want: idleCrowded},
		"half a length":          {do: func(t *testing.T, c net.Conn) { mustWrite(t, c, []byte{0}) }, want: frameTimeout},
		"half a query":           {do: func(t *testing.T, c net.Conn) { mustWrite(t, c, frame(t, query("a.", 1))[:20]) }, want: frameTimeout},
		"a frame too short":      {do: func(t *testing.T, c net.Conn) { mustWrite(t, c, []byte{0, 11}) }, want: 0},
		"a frame too long":       {do: func(t *testing.T, c net.Conn) { mustWrite(t, c, []byte{0xff, 0xff}) }, want: 0},
		"idle after an answer":   {do: func(t *testing.T, c net.Conn) { mustWrite(t, c, frame(t, query("a.", 1))); mustRead(t, c) }, want: idleTimeout},
		"a trickle within query": {do: trickle, want: 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, func(s *Settings) { s.Limits.Conns = 10 })
				for range tt.open {
					pipeConn(t, r)
				}
				conn, _ := pipeConn(t, r)
				tt.do(t, conn)
				start := time.Now()
				if _, err := readMsg(conn); !errors.Is(err, io.EOF) {
					t.Errorf("read: %v, want EOF", err)
				}
				if d := time.Since(start); d != tt.want {
					t.Errorf("closed after %v, want %v", d, tt.want)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if n := r.Stats().Conns; n != 0 {
					t.Errorf("%d connections left", n)
				}
				end(t, r)
			})
		})
	}
}

// TestTCPIdleMakeRoom: when connections become many, those that have been idle
// since before make room as well, and no later for more that come.
func TestTCPIdleMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, func(s *Settings) { s.Limits.Conns = 10 })
		old, _ := pipeConn(t, r)
		busy, _ := pipeConn(t, r)
		mustWrite(t, busy, frame(t, query("example.com.", dns.TypeA)))
		mustRead(t, busy)
		time.Sleep(idleTimeout / 2)
		start := time.Now()
		for range 7 {
			pipeConn(t, r)
		}
		time.Sleep(idleCrowded * 3 / 4)
		pipeConn(t, r)
		mustWrite(t, busy, frame(t, query("example.com.", dns.TypeA))) // in time: it stays
		mustRead(t, busy)
		if _, err := readMsg(old); !errors.Is(err, io.EOF) {
			t.Errorf("read: %v, want EOF", err)
		}
		if d := time.Since(start); d != idleCrowded {
			t.Errorf("closed %v after it became crowded, want %v", d, idleCrowded)
		}
		time.Sleep(idleCrowded / 2)
		mustWrite(t, busy, frame(t, query("example.com.", dns.TypeA)))
		mustRead(t, busy)
		_ = busy.Close()
		time.Sleep(time.Minute)
		end(t, r)
	})
}

// TestTCPEviction: when all places are taken, whoever asks nothing gives way to
// whoever comes, the longest idle first; whoever asks, or has just come, does not.
func TestTCPEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, func(s *Settings) { s.Limits.Conns = 4 })
		asks := func(c net.Conn) error {
			if _, err := c.Write(frame(t, query("example.com.", dns.TypeA))); err != nil {
				return err
			}
			_, err := readMsg(c)
			return err
		}
		slow, _ := pipeConn(t, r)
		mustWrite(t, slow, []byte{0})
		time.Sleep(leastUse)
		var busy []net.Conn
		for range 3 {
			c, _ := pipeConn(t, r)
			busy = append(busy, c)
		}
		time.Sleep(leastUse / 2)
		newcomer, _ := pipeConn(t, r) // in the place of the slow one
		if _, err := readMsg(slow); !errors.Is(err, io.EOF) {
			t.Errorf("read: %v, want EOF", err)
		}
		for i, c := range append(busy, newcomer) {
			if err := asks(c); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		}
		// All have just asked: there is no place.
		ours, theirs := net.Pipe()
		refused := newTCPConn(r, ours, netip.MustParseAddrPort("10.0.0.9:4000"), &r.framed)
		if reason, ok := r.conns.admit(refused, nil); ok || reason != ShedConns {
			t.Errorf("admitted: %v, %v", reason, ok)
		}
		_, _ = ours.Close(), theirs.Close()
		for _, c := range append(busy, newcomer) {
			_ = c.Close()
		}
		time.Sleep(time.Minute)
		end(t, r)
		if s := r.Stats(); s.Conns != 0 || len(r.conns.perClient) != 0 || s.Shed[ShedConns] != 1 {
			t.Errorf("%d connections left, of %v; %d given up", s.Conns, r.conns.perClient, s.Shed[ShedConns])
		}
	})
}

// TestTCPTurns: connections work on their queries in turns, half as many at a
// time as there are CPUs, and one that stands still holds up nobody for long.
func TestTCPTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release, working := make(chan struct{}), 0
		var mu sync.Mutex
		r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)}, withSearch(t, func(s *Search) {
			s.Client = func(netip.Addr) (*search.List, bool) {
				mu.Lock()
				working++
				mu.Unlock()
				<-release
				return nil, true
			}
		}))
		turns := cap(r.conns.working)
		want := func(n int) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if working != n {
				t.Errorf("%d at work, want %d", working, n)
			}
		}
		for range turns + 2 {
			conn, _ := pipeConn(t, r)
			mustWrite(t, conn, frame(t, query("example.com.", dns.TypeA)))
		}
		want(turns)
		time.Sleep(workPatience)
		want(turns + 2)
		close(release)
		synctest.Wait()
		if n := len(r.conns.working); n != 0 {
			t.Errorf("%d turns not given back", n)
		}
		for ; r.Stats().Conns > 0; time.Sleep(time.Second) {
		}
		end(t, r)
	})
}

// trickle sends an octet every half a second until that is refused.
func trickle(t *testing.T, c net.Conn) {
	start := time.Now()
	for _, b := range frame(t, query("example.com.", dns.TypeA)) {
		if _, err := c.Write([]byte{b}); err != nil {
			break
		}
		time.Sleep(500 * time.Millisecond)
	}
	if d := time.Since(start); d > frameTimeout+time.Second {
		t.Errorf("trickled for %v", d)
	}
}

// TestTCPClientTakesNothing: a client that reads no answers is cut off, and
// holds up nobody else meanwhile.
func TestTCPClientTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
		deaf, _ := pipeConn(t, r)
		mustWrite(t, deaf, frame(t, query("example.com.", dns.TypeA)))
		synctest.Wait()
		good, _ := pipeConn(t, r)
		start := time.Now()
		mustWrite(t, good, frame(t, query("example.com.", dns.TypeA)))
		mustRead(t, good)
		if d := time.Since(start); d != 0 {
			t.Errorf("the other client waited %v", d)
		}
		time.Sleep(writeTimeout)
		synctest.Wait()
		if n := r.Stats().Conns; n != 1 {
			t.Errorf("%d connections, want the good one only", n)
		}
		if n := r.conns.output.Load(); n != 0 {
			t.Errorf("%d octets of output still accounted", n)
		}
		_ = good.Close()
		end(t, r)
	})
}

// TestTCPPipelineBound: no more than maxPipelined queries of one connection
// are under way; the rest is read when there is room.
func TestTCPPipelineBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			<-release
			return addressOf(t, 0)(ctx, m)
		}}
		r := newTestResolver(t, f)
		conn, c := pipeConn(t, r)
		const n = 2 * maxPipelined
		go func() {
			for range n {
				if _, err := conn.Write(frame(t, query("example.com.", dns.TypeA))); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		synctest.Wait()
		c.mu.Lock()
		owed := c.owed
		c.mu.Unlock()
		if owed != maxPipelined {
			t.Errorf("%d queries under way, want %d", owed, maxPipelined)
		}
		close(release)
		for range n {
			mustRead(t, conn)
		}
		_ = conn.Close()
		end(t, r)
	})
}

// TestTCPDrain: what was read is answered before the connection ends.
func TestTCPDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
			time.Sleep(time.Second)
			return addressOf(t, 60)(ctx, m)
		}}
		r := newTestResolver(t, f)
		conn, c := pipeConn(t, r)
		mustWrite(t, conn, frame(t, query("example.com.", dns.TypeA)))
		synctest.Wait()
		c.startDrain()
		if m := mustRead(t, conn); len(m.Answer) != 1 {
			t.Errorf("got %v", m)
		}
		if _, err := readMsg(conn); !errors.Is(err, io.EOF) {
			t.Errorf("read: %v, want EOF", err)
		}
		end(t, r)
	})
}
