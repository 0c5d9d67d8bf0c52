package resolver

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// TestDrainOfClosedSocket: a reader that drains ends when its socket is closed
// under it, and does not take its last batch for a new one.
func TestDrainOfClosedSocket(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	ep, err := Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), ListenOptions{Readers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	u, err := newUDPReader(r, ep.UDP[0], 1)
	if err != nil {
		t.Fatal(err)
	}
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if err := u.raw.Read(onlyOnce(u)); err != nil {
		t.Fatal(err)
	}
	if err := ep.UDP[0].Close(); err != nil {
		t.Fatal(err)
	}
	u.drain()
	if n := u.c.queries[UDP].Load(); n != 1 {
		t.Errorf("%d queries served, want the one that came", n)
	}
}

// TestDrainOfNewConnection: a client that has connected and not asked yet gets
// the time to; one that has asked gets no more of it.
func TestDrainOfNewConnection(t *testing.T) {
	for name, tt := range map[string]struct {
		before, after int // queries before and after the drain begins
		closed        time.Duration
	}{
		"never asked":        {closed: drainFirst},
		"asks after":         {after: 1, closed: drainRead},
		"asked before":       {before: 1, closed: drainRead},
		"asked before, asks": {before: 1, after: 1, closed: drainRead},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
				conn, c := pipeConn(t, r)
				ask := func(n int) {
					for range n {
						mustWrite(t, conn, frame(t, query("example.com.", dns.TypeA)))
						mustRead(t, conn)
					}
				}
				ask(tt.before)
				synctest.Wait()
				c.startDrain()
				time.Sleep(drainRead / 2)
				if tt.before == 0 && tt.after > 0 {
					time.Sleep(drainFirst / 2)
				}
				ask(tt.after)
				start := time.Now()
				if tt.after == 0 {
					start = start.Add(-drainRead / 2)
				}
				if _, err := readMsg(conn); !errors.Is(err, io.EOF) {
					t.Errorf("read: %v, want EOF", err)
				}
				if d := time.Since(start); d != tt.closed {
					t.Errorf("closed after %v, want %v", d, tt.closed)
				}
				end(t, r)
			})
		})
	}
}

// lateConn is a connection whose reader is held up: the first deadline that it
// sets has passed when it begins to wait.
type lateConn struct {
	*net.TCPConn
	once sync.Once
}

func (c *lateConn) SetReadDeadline(at time.Time) error {
	c.once.Do(func() { at = time.Unix(1, 0) })
	return c.TCPConn.SetReadDeadline(at)
}

// TestLateReader: a query that lies in the socket when the reader's time is up
// is answered.
func TestLateReader(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn := dial(t, "tcp", l.Addr().(*net.TCPAddr).AddrPort())
	ours, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, conn, frame(t, query("example.com.", dns.TypeA)))
	for !readable(ours) {
		runtime.Gosched()
	}
	c := newTCPConn(r, &lateConn{TCPConn: ours}, netip.MustParseAddrPort("127.0.0.1:4000"), &r.framed)
	c.drain = true
	go c.run()
	mustRead(t, conn)
}

// TestShutdownDeadlineTCP: when the time for shutting down is up, questions that
// still wait are answered SERVFAIL over TCP as well, a client that goes on
// asking is read no further, and one that takes no answers keeps nobody.
func TestShutdownDeadlineTCP(t *testing.T) {
	f := &fakeForwarder{answer: func(ctx context.Context, m *dns.Msg) error {
		switch {
		case strings.HasPrefix(m.Question[0].Name, "hole"):
			<-ctx.Done()
			return ctx.Err()
		case m.Question[0].Qtype == dns.TypeTXT:
			return textOf(t)(ctx, m)
		}
		return addressOf(t, 60)(ctx, m)
	}}
	r := newTestResolver(t, f)
	ep := serve(t, r, "127.0.0.1:0", 1)
	waiting, busy, deaf := dial(t, "tcp", ep.Addr), dial(t, "tcp", ep.Addr), dial(t, "tcp", ep.Addr)
	mustWrite(t, waiting, frame(t, query("hole.example.com.", dns.TypeA)))
	mustWrite(t, deaf, bytes.Repeat(frame(t, query("example.com.", dns.TypeTXT)), 400))
	var asking sync.WaitGroup
	asking.Go(func() {
		q := frame(t, query("example.com.", dns.TypeA))
		for {
			if _, err := busy.Write(q); err != nil {
				return
			}
			if _, err := readMsg(busy); err != nil {
				return
			}
		}
	})
	for s := r.Stats(); s.InFlight == 0 || s.Queries[TCP] < 20; s = r.Stats() {
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := r.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errStuck) {
		t.Errorf("shutdown: %v", err)
	}
	if m := mustRead(t, waiting); m.Rcode != dns.RcodeServerFailure {
		t.Errorf("the question that waited: %v", m)
	}
	asking.Wait()
	if s := r.Stats(); s.Conns != 0 || s.InFlight != 0 || r.conns.output.Load() != 0 {
		t.Errorf("left: %+v, %d octets of output", s, r.conns.output.Load())
	}
}

// TestLeaveTwice: an endpoint that is removed while everything is shut down is
// counted once.
func TestLeaveTwice(t *testing.T) {
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 60)})
	ep := serve(t, r, "127.0.0.1:0", 2)
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.ReadMsg(); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	services := maps.Clone(r.serving)
	r.mu.Unlock()
	for range 2 {
		if err := r.leave(t.Context(), services, func() {}); err != nil {
			t.Error(err)
		}
	}
	if s := r.Stats(); s.Queries[UDP] != 1 {
		t.Errorf("%d queries counted, want 1", s.Queries[UDP])
	}
}
