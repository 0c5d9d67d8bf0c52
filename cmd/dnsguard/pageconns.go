package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxPageConns bounds the connections to each of the pages' sockets: on a
	// host network everybody can open them, and each costs up to 30 kB.
	maxPageConns = 64

	// pageTimeout bounds the writing of a page to a client that does not read.
	pageTimeout = 30 * time.Second

	// pageBuffer is the room in the kernel for what a connection has to write:
	// more than /metrics has is not waiting anyway.
	pageBuffer = 64 << 10
	// requestBuffer is that for requests: who sends many before they are
	// answered waits in its own kernel, not in ours.
	requestBuffer = 4 << 10
)

// pageConns are the connections to a socket for pages. A newcomer that finds no
// room takes that of the connection for which nothing has been done for the
// longest time; whoever waited for room would wait for those that want nothing,
// and a scrape would wait longer than Prometheus does. Only where a page is
// being made for every other, the newcomer has to go.
type pageConns struct {
	mu    sync.Mutex
	conns map[net.Conn]*pageConn
	count uint64
}

type pageConn struct {
	pages int    // being made
	last  uint64 // when something was done: the count of such events
}

func newPageConns() *pageConns { return &pageConns{conns: map[net.Conn]*pageConn{}} }

// state follows the connections' states, as [http.Server].ConnState.
func (p *pageConns) state(c net.Conn, s http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch s {
	case http.StateNew:
		bufferLess(c)
		p.count++
		p.conns[c] = &pageConn{last: p.count}
		if len(p.conns) > maxPageConns {
			p.evict()
		}
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	case http.StateActive, http.StateIdle:
		// The first byte of a request is no merit: see work.
	}
}

// evict closes a connection; the caller holds mu.
func (p *pageConns) evict() {
	var longest net.Conn
	for c, s := range p.conns {
		if s.pages == 0 && (longest == nil || s.last < p.conns[longest].last) {
			longest = c
		}
	}
	if longest != nil { // the newcomer at least
		delete(p.conns, longest)
		_ = longest.Close() // its server goroutine notices
	}
}

// bufferLess limits what the kernel keeps for a connection to take.
func bufferLess(c net.Conn) {
	if b, ok := c.(interface{ SetWriteBuffer(bytes int) error }); ok {
		_ = b.SetWriteBuffer(pageBuffer) // else it keeps more
	}
}

// requestsLess limits what the kernel keeps of the requests of each connection to
// a socket, also of those that nobody has taken in yet.
func requestsLess(c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, requestBuffer) })
	return errors.Join(cerr, err)
}

type pageConnKey struct{}

// context tells the handlers their connection, as [http.Server].ConnContext.
func (p *pageConns) context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, pageConnKey{}, c)
}

// wrap keeps connections for which h makes a page.
func (p *pageConns) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(pageConnKey{}).(net.Conn)
		p.work(c, +1)
		defer p.work(c, -1)
		deadline := time.Now().Add(pageTimeout)
		if strings.HasPrefix(r.URL.Path, "/debug/pprof/") {
			deadline = time.Time{} // a profile takes as long as was asked for
		}
		_ = http.NewResponseController(w).SetWriteDeadline(deadline) // it is there
		h.ServeHTTP(w, r)
	})
}

// work notes that a page is begun, or done with -1.
func (p *pageConns) work(c net.Conn, pages int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.conns[c]; s != nil {
		p.count++
		s.pages, s.last = s.pages+pages, p.count
	}
}

// pageServer serves the pages of h.
func (d *daemon) pageServer(h http.Handler) *http.Server {
	conns := newPageConns()
	return &http.Server{
		Handler:           conns.wrap(h),
		ConnState:         conns.state,
		ConnContext:       conns.context,
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
	}
}
