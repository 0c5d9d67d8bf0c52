package resolver

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
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
	u, err := newUDPReader(r, ep.UDP[0])
	if err != nil {
		t.Fatal(err)
	}
	conn := &dns.Conn{Conn: dial(t, "udp", ep.Addr)}
	if err := conn.WriteMsg(query("example.com.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if err := u.raw.Read(u.recvFunc); err != nil {
		t.Fatal(err)
	}
	u.serve()
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
