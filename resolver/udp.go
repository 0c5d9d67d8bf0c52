package resolver

import (
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// udpReader serves one UDP socket: batches in, hits out, misses to flights.
//
// The goroutine is not locked to a thread and waits in the runtime's poller:
// of the forms that were measured (blocking recvmmsg on a locked thread,
// RawConn with Syscall, ReadFromUDPAddrPort), this one costs half the CPU at
// 1,000 to 5,000 queries a second.
type udpReader struct {
	r    *Resolver
	conn *net.UDPConn
	raw  syscall.RawConn
	c    counters
	s    *scratch
	in   *batch
	out  *batch
	owed sync.WaitGroup // queries that wait in flights

	clients clientSketch
	beat    heartbeat
	stuck   atomic.Bool // the watchdog has closed conn

	// The functions given to raw, made once so that a batch allocates
	// nothing, with their arguments and results.
	recvFunc     func(fd uintptr) bool
	sendFunc     func(fd uintptr)
	received     int
	sent, toSend int
	wildcard     bool
	inet         bool // an IPv4 socket
	errno        syscall.Errno
}

// newUDPReader returns the reader of one of an address's sockets.
func newUDPReader(r *Resolver, conn *net.UDPConn, sockets int) (*udpReader, error) {
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(enlarge)
	}
	if err != nil {
		return nil, err
	}
	length := min(batchLen, max(batchTotal/sockets, leastBatch))
	u := &udpReader{r: r, conn: conn, raw: raw, in: newBatch(length, datagramLen), out: newBatch(length, udpSize+replySlack)}
	u.s = newScratch(&u.c)
	local := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
	u.wildcard, u.inet = local.IsUnspecified(), local.Unmap().Is4()
	u.recvFunc = func(fd uintptr) bool {
		u.received, u.errno = u.in.recv(fd, u.wildcard)
		return u.errno != unix.EAGAIN
	}
	u.sendFunc = u.sendAll
	return u, nil
}

// sendBuffer is the send buffer of each UDP socket in octets of kernel memory: a
// bound, taken only by what cannot leave. The system's default, 208 KiB, is what
// the answers to a single neighbour that does not respond fill
// (net.ipv4.neigh.default.unres_qlen_bytes).
const sendBuffer = 4 << 20

// enlarge gives a socket its send buffer, or as much of it as wmem_max allows to
// a process without the capability.
func enlarge(fd uintptr) {
	// The kernel doubles the value for its own overhead (socket(7)).
	if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer/2) != nil {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer/2)
	}
}

// replySlack is spare room behind an output buffer, so that an encoder that
// appends before it measures stays within it.
const replySlack = 128

// run serves the socket until it is closed or told to drain; then it reads the
// queue empty.
func (u *udpReader) run() {
	for {
		err := u.raw.Read(u.recvFunc)
		switch {
		case err != nil && os.IsTimeout(err):
			u.drain()
			return
		case err != nil:
			return // closed
		case u.errno != 0:
			// Errors of earlier answers (ICMP) come up here once and
			// mean nothing for the socket.
			continue
		}
		u.serve()
	}
}

// drain serves what is in the queue and returns when it is empty, or when the
// socket is closed.
func (u *udpReader) drain() {
	for u.raw.Control(func(fd uintptr) { u.recvFunc(fd) }) == nil && u.errno != unix.EAGAIN {
		if u.errno == 0 {
			u.serve()
		}
	}
}

// serve answers the batch that was received.
func (u *udpReader) serve() {
	now := u.r.cache.Now()
	u.beat.begin(now)
	defer u.beat.end()
	src := source{transport: UDP, replier: u}
	out := 0
	for i := range u.received {
		u.beat.step()
		msg, cut := u.in.datagram(i)
		u.clients.count(u.r.hashPeer(&u.in.names[i]))
		src.peer = u.in.peer(i)
		if src.peer.Port() == 0 { // spoofed: no answer can be sent
			u.c.dropped.Add(1)
			continue
		}
		if u.wildcard {
			src.local = u.in.local(i)
		}
		buf := u.out.bufs[out]
		reply, _ := u.r.answer(u.s, msg, cut, &src, now, buf[:0])
		if len(reply) > 0 {
			if &reply[0] != &buf[0] {
				// An answer that was cut to size had outgrown its
				// buffer before.
				copy(buf, reply)
			}
			u.out.reply(out, len(reply), u.in, i)
			out++
		}
	}
	if out == 0 {
		return
	}
	u.sent, u.toSend = 0, out
	if u.raw.Control(u.sendFunc) != nil { // closed meanwhile
		u.c.sendErrors.Add(uint64(out))
	}
	u.c.duration(u.r.cache.Now()-now, uint64(out))
}

// sendAll sends the batch. A message that the kernel refuses (no route, a
// firewall's EPERM) is counted and skipped.
//
// It never waits for room. The send buffer is shared by all clients, and what
// fills it is no load: it is answers to neighbours that do not respond any more
// (or never existed: addresses can be forged), which the kernel holds until it
// has given up on them, for about 3 s (arp(7), unres_qlen_bytes). A reader that
// waited would stand still as long for everybody. Such answers are lost to their
// clients, like any datagram.
func (u *udpReader) sendAll(fd uintptr) {
	for u.sent < u.toSend {
		n, errno := u.out.send(fd, u.sent, u.toSend)
		switch {
		case errno == unix.EAGAIN:
			u.c.sendErrors.Add(uint64(u.toSend - u.sent)) //nolint:gosec // not negative
			return
		case errno != 0:
			u.c.sendErrors.Add(1)
			u.sent++
		default:
			u.sent += n
		}
	}
}

// owe counts a query that waits in a flight.
func (u *udpReader) owe() { u.owed.Add(1) }

// reply sends the answer of a flight, now or not at all: see sendAll.
func (u *udpReader) reply(w *waiter, msg []byte) {
	defer u.owed.Done()
	to := u.sockaddr(w.src.peer)
	var err error
	if cerr := u.raw.Control(func(fd uintptr) {
		_, err = unix.SendmsgN(int(fd), msg, w.src.local, to, unix.MSG_DONTWAIT)
	}); cerr != nil || err != nil {
		w.c.sendErrors.Add(1)
	}
}

// sockaddr returns a peer's address in the family of the socket.
func (u *udpReader) sockaddr(peer netip.AddrPort) unix.Sockaddr {
	if u.inet && peer.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(peer.Port()), Addr: peer.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(peer.Port()), Addr: peer.Addr().As16(), ZoneId: zoneIndex(peer.Addr().Zone())}
}
