package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
)

// TestPagesKeepRoom: whoever opens hundreds of connections and leaves them, in
// whatever state, takes neither the pages from others nor much memory.
func TestPagesKeepRoom(t *testing.T) {
	const many = 500
	r := start(t, startUpstream(t, "192.0.2.1"))
	for _, tt := range []struct{ name, says string }{
		{"silent", ""},
		{"in the middle of a request", "GET /metrics HTTP/1.1\r\nHost: a"},
		{"in the middle of a body", "GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nabc"},
		{"idle after a request", "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"},
		{"profiling for an hour", "GET /debug/pprof/goroutine?seconds=3600 HTTP/1.1\r\nHost: a\r\n\r\n"},
		{"without reading", "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			conns := make([]net.Conn, many)
			for i := range conns {
				conns[i] = dialPages(t, r.http)
				if _, err := io.WriteString(conns[i], tt.says); err != nil && !closedByPeer(err) {
					t.Fatal(err)
				}
			}
			// A new client each time, as a probe of kubelet's.
			for range 10 {
				client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.http+"/healthz", nil)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					t.Errorf("/healthz: %s", resp.Status)
				}
			}
			// Each of the server's connections has a goroutine or two.
			r.eventually("the others to be closed", func() bool {
				return runtime.NumGoroutine()-before <= 2*maxPageConns+20
			})
			open := 0
			for _, c := range conns {
				if isOpen(t, c) {
					open++
				}
			}
			if open > maxPageConns {
				t.Errorf("%d connections are open", open)
			}
			t.Logf("%d of %d connections are open", open, many)
		})
	}
}

func dialPages(t *testing.T, addr string) net.Conn {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// isOpen reads what has come and tells whether the peer has not closed.
func isOpen(t *testing.T, c net.Conn) bool {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err := io.Copy(io.Discard, c)
	return errors.Is(err, os.ErrDeadlineExceeded)
}

func closedByPeer(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && !op.Timeout()
}

// TestPageConns: who goes when there is no room.
func TestPageConns(t *testing.T) {
	for _, tt := range []struct {
		name string
		busy func(i int) bool // a page is being made
		used []int            // for which a page was made since
		want int              // who goes; maxPageConns is the newcomer
	}{
		{"the oldest", func(int) bool { return false }, nil, 0},
		{"the one left alone longest", func(int) bool { return false }, []int{0, 1}, 2},
		{"not one that is at work", func(i int) bool { return i < 5 }, nil, 5},
		{"the newcomer, where all are at work", func(int) bool { return true }, nil, maxPageConns},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPageConns()
			release, begun := make(chan struct{}), make(chan struct{})
			working := p.wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				begun <- struct{}{}
				<-release
			}))
			done := p.wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			var conns []net.Conn
			var gone []int
			page := func(h http.Handler, c net.Conn) {
				req := httptest.NewRequestWithContext(p.context(context.Background(), c), http.MethodGet, "/healthz", nil)
				h.ServeHTTP(httptest.NewRecorder(), req)
			}
			enter := func() {
				c := &pageTestConn{}
				number := len(conns)
				c.closed = func() { gone = append(gone, number) }
				conns = append(conns, c)
				p.state(c, http.StateNew)
			}
			for i := range maxPageConns {
				enter()
				if tt.busy(i) {
					go page(working, conns[i])
					<-begun
				}
			}
			for _, i := range tt.used {
				page(done, conns[i])
			}
			if len(gone) > 0 {
				t.Fatalf("%v had to go though there was room", gone)
			}
			enter()
			if want := []int{tt.want}; !slices.Equal(gone, want) {
				t.Errorf("gone are %v, want %v", gone, want)
			}
			close(release)
			if n := len(p.conns); n != maxPageConns {
				t.Errorf("%d connections", n)
			}
			for _, c := range conns {
				p.state(c, http.StateClosed)
			}
			if n := len(p.conns); n != 0 {
				t.Errorf("%d connections after their end", n)
			}
		})
	}
}

// pageTestConn tells when it is closed.
type pageTestConn struct {
	net.Conn
	closed func()
}

func (c *pageTestConn) Close() error {
	c.closed()
	return nil
}
