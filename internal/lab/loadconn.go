package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// receiveBuffer is asked for each fixed socket: the default overflows in bursts.
const receiveBuffer = 4 << 20

// loadConn is one socket of a generator.
type loadConn struct {
	fd       int // -1 once closed
	fresh    bool
	inFlight int
	in, out  []byte // TCP: octets not yet parsed, not yet written
}

// connFor returns the socket for a query, opening it if need be.
func (g *generator) connFor(number int) (*loadConn, error) {
	if g.load.Sockets == 0 {
		return g.open(true)
	}
	slot := number % g.load.Sockets
	if c := g.conns[slot]; c != nil && c.fd >= 0 {
		return c, nil
	}
	c, err := g.open(false)
	g.conns[slot] = c
	return c, err
}

// open makes a socket connected (for TCP: being connected) to the server.
func (g *generator) open(fresh bool) (*loadConn, error) {
	family, to := sockaddr(g.load.Server)
	kind := unix.SOCK_DGRAM
	if g.load.TCP {
		kind = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket: %w", err)
	}
	c := &loadConn{fd: fd, fresh: fresh}
	if !fresh {
		// Best effort: a smaller buffer shows up as lost answers.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	}
	if g.load.TCP {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect to %v: %w", g.load.Server, err)
	}
	events := uint32(unix.EPOLLIN)
	if g.load.TCP {
		events |= unix.EPOLLOUT | unix.EPOLLET
	}
	if err := g.watch(fd, events); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	for len(g.byFD) <= fd {
		g.byFD = append(g.byFD, nil)
	}
	g.byFD[fd] = c
	return c, nil
}

// drop closes a socket.
func (g *generator) drop(c *loadConn) {
	if c.fd < 0 {
		return
	}
	g.byFD[c.fd] = nil
	_ = unix.Close(c.fd)
	c.fd = -1
}

// write sends a query; what does not go out is lost, in its own time.
func (g *generator) write(c *loadConn, query []byte) {
	if g.load.TCP {
		c.out = binary.BigEndian.AppendUint16(c.out, uint16(len(query)))
		c.out = append(c.out, query...)
		g.flush(c)
		return
	}
	if _, err := unix.Write(c.fd, query); errors.Is(err, unix.ECONNREFUSED) {
		// The error of an earlier query, reported now: this one was not sent.
		g.result.Refused++
		_, _ = unix.Write(c.fd, query)
	}
}

// ready handles what epoll reports of a socket.
func (g *generator) ready(c *loadConn, events uint32) {
	if !g.load.TCP {
		g.readDatagrams(c)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		g.flush(c)
	}
	if c.fd >= 0 && events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		g.readStream(c)
	}
}

func (g *generator) readDatagrams(c *loadConn) {
	for c.fd >= 0 { // an answer closes a fresh socket
		n, err := unix.Read(c.fd, g.answer)
		switch {
		case err == nil:
			g.receive(c, g.answer[:n])
		case errors.Is(err, unix.ECONNREFUSED):
			g.result.Refused++
			if c.fresh {
				g.loseAll(c)
			}
		case errors.Is(err, unix.EINTR):
		default: // EAGAIN: read empty
			return
		}
	}
}

// flush writes what a TCP connection takes.
func (g *generator) flush(c *loadConn) {
	for len(c.out) > 0 {
		n, err := unix.Write(c.fd, c.out)
		switch {
		case err == nil:
			c.out = c.out[:copy(c.out, c.out[n:])]
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOTCONN):
			return // not connected yet, or full: EPOLLOUT follows
		case errors.Is(err, unix.EINTR):
		default:
			g.broken(c)
			return
		}
	}
}

// readStream reads a TCP connection empty; edge-triggered events demand it.
func (g *generator) readStream(c *loadConn) {
	for c.fd >= 0 {
		n, err := unix.Read(c.fd, g.answer)
		switch {
		case err == nil && n > 0:
			c.in = append(c.in, g.answer[:n]...)
			g.parse(c)
		case errors.Is(err, unix.EAGAIN):
			return
		case errors.Is(err, unix.EINTR):
		default: // the end of the stream, or an error
			g.broken(c)
			return
		}
	}
}

// parse takes whole answers off a TCP connection's input, RFC 1035 section 4.2.2.
func (g *generator) parse(c *loadConn) {
	const prefix = 2
	for len(c.in) >= prefix {
		end := prefix + int(binary.BigEndian.Uint16(c.in))
		if len(c.in) < end {
			return
		}
		g.receive(c, c.in[prefix:end])
		c.in = c.in[:copy(c.in, c.in[end:])]
	}
}

// broken ends a TCP connection; its queries are lost at once.
func (g *generator) broken(c *loadConn) {
	if c.inFlight > 0 {
		g.result.Refused++
	}
	g.loseAll(c)
	g.drop(c)
}

// loseAll gives up every query that waits on the socket.
func (g *generator) loseAll(c *loadConn) {
	for number := g.oldest; number < g.result.Sent && c.inFlight > 0; number++ {
		if g.waiting[number] == c {
			g.lose(number)
		}
	}
}

// sockaddr converts an address for the socket calls.
func sockaddr(a netip.AddrPort) (family int, to unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
