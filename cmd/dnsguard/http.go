package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
)

// handler serves the daemon's pages. With private, /statusz and profiling too
// are served to everyone who can connect: on the control socket file
// permissions decide who that is. Without, only to loopback: on a host network
// the port is everybody's.
func (d *daemon) handler(private bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", d.healthz)
	mux.HandleFunc("GET /readyz", d.readyz)
	// What is logged for each page is up to whoever can connect: clients that go
	// while they are written to. An error of ours is the page, and counted.
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.registry, promhttp.HandlerOpts{
		Registry: d.registry, MaxRequestsInFlight: 4, ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
	}))
	guard := loopbackOnly
	if private {
		guard = func(h http.HandlerFunc) http.HandlerFunc { return h }
	}
	mux.HandleFunc("GET /statusz", guard(d.statusz))
	if private {
		// It asks upstreams, so not for everybody on the machine.
		mux.HandleFunc("GET "+explainPage, d.explainHTTP)
		mux.HandleFunc("GET "+flowsPage, d.flowsHTTP)
		mux.HandleFunc("POST "+leavePage, d.leaveHTTP)
	}
	profile := guard
	if !private {
		few := atMost(maxProfiles)
		profile = func(h http.HandlerFunc) http.HandlerFunc { return guard(few(h)) }
	}
	mux.HandleFunc("GET /debug/pprof/", profile(pprof.Index))
	mux.HandleFunc("GET /debug/pprof/cmdline", profile(pprof.Cmdline))
	mux.HandleFunc("GET /debug/pprof/profile", profile(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/symbol", profile(pprof.Symbol))
	mux.HandleFunc("GET /debug/pprof/trace", profile(pprof.Trace))
	return mux
}

// maxProfiles bounds the profiles under way for whoever is on this machine: each
// keeps its connection for as long as it is asked to take, hours if need be, and
// all of maxPageConns together would keep scrapes out.
const maxProfiles = 4

// atMost returns what lets n requests at a time through to handlers, all of them
// together; others get 503.
func atMost(n int) func(http.HandlerFunc) http.HandlerFunc {
	under := make(chan struct{}, n)
	return func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			select {
			case under <- struct{}{}:
				defer func() { <-under }()
				h(w, r)
			default:
				http.Error(w, fmt.Sprintf("%d profiles are under way", n), http.StatusServiceUnavailable)
			}
		}
	}
}

func loopbackOnly(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, err := netip.ParseAddrPort(r.RemoteAddr)
		if err != nil || !peer.Addr().Unmap().IsLoopback() {
			http.Error(w, "only from loopback or over the control socket", http.StatusForbidden)
			return
		}
		h(w, r)
	}
}

// healthz answers 200, or 503 once a reader has stood still: the process then
// works with less than it should, and had better be started anew.
func (d *daemon) healthz(w http.ResponseWriter, _ *http.Request) {
	if n := d.resolver.Stats().Stuck; n > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintf(w, "%d sockets were closed because their reader stood still\n", n)
		return
	}
	fmt.Fprintln(w, "ok")
}

// readyz answers 200 with the warnings, or 503 with the reasons, one a line.
func (d *daemon) readyz(w http.ResponseWriter, _ *http.Request) {
	reasons, warnings := d.conditions.get()
	if len(reasons) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, strings.Join(reasons, "\n"))
	} else {
		fmt.Fprintln(w, "ok")
	}
	for _, text := range warnings {
		fmt.Fprintln(w, "warning:", text)
	}
}

// statusz answers with the status for a person, or as JSON.
func (d *daemon) statusz(w http.ResponseWriter, r *http.Request) {
	s := d.status()
	if strings.Contains(r.Header.Get("Accept"), "application/json") {
		writeJSON(w, s)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	s.write(w)
}

// writeJSON answers with v.
func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // the client went
}

// listenHTTP opens the TCP socket of the pages, none for an empty address. With
// share, two processes of one user may have it at a time, while one takes over
// from the other (SO_REUSEPORT).
func listenHTTP(ctx context.Context, addr string, share bool) (net.Listener, error) {
	if addr == "" {
		return nil, nil
	}
	lc := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
		if share {
			if err := reusePort(network, address, c); err != nil {
				return err
			}
		}
		return requestsLess(c)
	}}
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("http: %w; choose another address with http (--http=ADDRESS:PORT, empty for none)", err)
	}
	return l, nil
}

// reusePort sets SO_REUSEPORT.
func reusePort(_, _ string, c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(cerr, err)
}

// errTaken tells that another process answers on the control socket.
var errTaken = errors.New("another process answers there")

// listenControl opens the control socket. A socket file that a dead process
// left behind is replaced.
func listenControl(ctx context.Context, path string) (net.Listener, error) {
	if path == "" {
		return nil, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // the socket itself is private
		return nil, fmt.Errorf("control: %w; choose another path with control (--control=PATH, for all commands)", err)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode()&fs.ModeSocket == 0 {
			return nil, fmt.Errorf("control: %s exists and is no socket", path)
		}
		var dial net.Dialer
		if c, err := dial.DialContext(ctx, "unix", path); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("control: %s: %w", path, errTaken)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("control: %w", err)
		}
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("control: %w", err), l.Close())
	}
	return l, nil
}

// pagesRetry is how often a socket for pages is tried that somebody has: another
// dnsguard that is about to leave, or NodeLocal DNSCache, whose metrics have the
// same port.
const pagesRetry = time.Second

// servePages serves the pages on l until ctx ends. Where there is none, because
// of err, queries are answered without pages, and listen is tried again.
func (d *daemon) servePages(ctx context.Context, name string, l net.Listener, err error, private bool, listen func() (net.Listener, error)) {
	if err != nil {
		d.log.Warn("pages cannot be served yet", "on", name, "error", err)
	}
	for err != nil {
		d.conditions.warn(name, strings.TrimPrefix(err.Error(), name+": "))
		select {
		case <-time.After(pagesRetry):
		case <-ctx.Done():
			return
		}
		l, err = listen()
	}
	d.conditions.warn(name, "")
	if l == nil {
		return
	}
	s := d.pageServer(d.handler(private))
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		d.log.Error("http server ended", "address", l.Addr().String(), "error", err)
	}
}
