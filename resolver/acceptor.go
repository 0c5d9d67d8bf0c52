package resolver

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// acceptor takes in the TCP connections of one listener.
type acceptor struct {
	l       *net.TCPListener
	clients clientSketch
	beat    heartbeat
	stuck   atomic.Bool // the watchdog has closed l
}

// acceptPause is how long an acceptor lets its queue be when the process has no
// room for another connection.
const acceptPause = 100 * time.Millisecond

// accept takes in TCP connections until the listener is closed, or its deadline
// has passed: then it takes in those that are queued, and closes it. A queued
// connection is established to its client, which may have sent queries; and as
// long as the listener is open the kernel queues more.
func (r *Resolver) accept(svc *service, ep *Endpoint, a *acceptor) {
	for draining := false; ; {
		if draining && !readable(a.l) {
			_ = a.l.Close()
			return
		}
		conn, err := a.l.AcceptTCP()
		switch {
		case err == nil:
			a.beat.begin(r.cache.Now())
			r.serveConn(svc, ep, a, conn)
			a.beat.end()
		case errors.Is(err, os.ErrDeadlineExceeded) && !draining:
			draining = true
			_ = a.l.SetDeadline(time.Now().Add(time.Second)) // far: the queue is not empty
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
			// Out of file descriptors or memory: the connection stays
			// queued. Those that are open close soon.
			r.conns.drain()
			if !r.pause(acceptPause) {
				return
			}
		default:
			// The client went while queued, or the network had an error
			// for the new connection: not for the listener (accept(2)).
			// A firewall's EPERM may last.
			if !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EPROTO) && !r.pause(acceptPause) {
				return
			}
		}
	}
}

// readable reports whether something waits to be read or accepted.
func readable(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) //nolint:gosec // a descriptor
	})
	return err == nil && n > 0
}

// pause waits, and tells whether to go on.
func (r *Resolver) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

// serveConn serves a connection if there is room for it.
func (r *Resolver) serveConn(svc *service, ep *Endpoint, a *acceptor, conn *net.TCPConn) {
	peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	peer = netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port())
	a.clients.count(r.hashClient(peer.Addr().As16()), 1)
	t := newTCPConn(r, conn, peer, &r.framed)
	if reason, ok := r.conns.admit(t, ep); !ok {
		r.framed.shed[reason].Add(1)
		_ = conn.Close()
		return
	}
	if svc.leaving.Load() {
		t.startDrain()
	}
	svc.tcp.Go(func() {
		t.run()
		r.conns.remove(t)
	})
}
