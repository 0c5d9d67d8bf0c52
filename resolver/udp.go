package resolver

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/mmsg"
)

// Sizes of a batch. Each reader owns one, in whose buffers the answers are written
// as well: 64 x 2 KiB and its headers, about 150 KiB, and less where there are many
// readers.
const (
	// batchLen bounds how long one RawSyscall keeps its P: receiving 64
	// small datagrams takes the kernel about 60 us.
	batchLen = 64
	// batchTotal is how many datagrams the batches of an address's readers hold
	// together, but each at least leastBatch.
	batchTotal = 8 * batchLen
	leastBatch = 8
	// datagramLen is the largest query taken in over UDP. Queries are far
	// below 512 octets but for EDNS padding (RFC 8467: up to 128 octets'
	// steps); a longer one is answered FORMERR.
	datagramLen = 2048
	// controlLen holds one IP_PKTINFO or IPV6_PKTINFO message.
	controlLen = 64
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
	in   *mmsg.Batch
	out  []mmsg.Header  // answers, in the buffers of in
	owed sync.WaitGroup // queries that wait in flights

	clients clientSketch
	heard   hearing
	beat    heartbeat
	stuck   atomic.Bool // the watchdog has closed conn

	// The functions given to raw, made once so that a batch allocates
	// nothing, with their arguments and results.
	readFunc    func(fd uintptr) bool
	receiveFunc func(fd uintptr)
	sendFunc    func(fd uintptr)
	received    int
	refused     int // reads in a row that failed
	wildcard    bool
	inet        bool // an IPv4 socket
	errno       syscall.Errno
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
	u := &udpReader{r: r, conn: conn, raw: raw, out: make([]mmsg.Header, 0, length)}
	u.s = newScratch(&u.c)
	local := conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr()
	u.wildcard, u.inet = local.IsUnspecified(), local.Unmap().Is4()
	batch := mmsg.Config{Len: length, Size: datagramLen, Peers: true}
	if u.wildcard {
		batch.Control = controlLen
	}
	u.in = mmsg.NewBatch(batch)
	u.readFunc, u.receiveFunc, u.sendFunc = u.read, u.receive, u.sendAll
	u.heard.sketch = &u.clients
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

// What refuses every read, such as a security module, may not keep a processor: from
// the fifth error in a row on, reads wait.
const (
	maxRefused  = 4
	refusedWait = 20 * time.Millisecond
)

// read takes a batch in, and reports whether there is one to serve, or an error.
//
// A batch of one it serves itself: with that, the queue was empty, and at low rates it
// still is. To find it so would be one system call of the five that a query costs there.
// RawConn.Read goes on to wait in the poller, which reports what has come since this
// call to Read began; a new call would forget it.
func (u *udpReader) read(fd uintptr) bool {
	u.receiveFunc(fd)
	if u.errno == 0 && u.received == 1 {
		u.serve()
		return false
	}
	return u.errno != unix.EAGAIN
}

// receive takes a batch in, if there is one.
func (u *udpReader) receive(fd uintptr) {
	switch u.received, u.errno = u.in.Recv(fd, unix.MSG_DONTWAIT); u.errno {
	case 0:
		u.refused = 0
	case unix.EAGAIN:
	default:
		u.refused++
	}
}

// run serves the socket until it is closed or told to drain; then it reads the
// queue empty.
func (u *udpReader) run() {
	for {
		err := u.raw.Read(u.readFunc)
		switch {
		case err != nil && os.IsTimeout(err):
			u.drain()
			return
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			// The poller was told of an error and of nothing else (EPOLLERR alone:
			// the socket was aborted, sock_diag(7), while its send buffer was full),
			// and does not wait until it is told of something.
			time.Sleep(refusedWait)
			if u.raw.Control(u.receiveFunc) != nil {
				return
			}
			if u.errno == 0 {
				u.serve()
			}
		case u.errno != 0:
			// Errors of earlier answers (ICMP) come up here once and
			// mean nothing for the socket.
			if u.refused > maxRefused {
				time.Sleep(refusedWait)
			}
		default:
			u.serve()
		}
	}
}

// drain serves what is in the queue and returns when it is empty or not to be read,
// or when the socket is closed.
func (u *udpReader) drain() {
	u.refused = 0
	for u.refused <= maxRefused {
		if u.raw.Control(u.receiveFunc) != nil || u.errno == unix.EAGAIN {
			return
		}
		if u.errno == 0 {
			u.serve()
		}
	}
}

// abandon gives up the socket of a goroutine that stands still, and does not wait for
// it: it may have the descriptor in use, which then stays open.
func (u *udpReader) abandon() {
	_ = leaveGroup(u.conn)
	go func() { _ = u.conn.Close() }() // ends when nobody uses the descriptor
}

// stepLen is after how many hits of a batch the heartbeat tells that it gets on:
// telling so costs as much as counting a query.
const stepLen = 8

// serve answers the batch that was received. An answer is written over its query:
// it begins with the query's id and question in any case, and what the query has
// behind them has been read when the answer's records are put there.
func (u *udpReader) serve() {
	now := u.r.cache.Now()
	u.beat.begin(now)
	defer u.beat.end()
	src := source{transport: UDP, replier: u}
	u.out = u.out[:0]
	for i := range u.received {
		// A hit takes no time. What the last one took further may have stood in
		// line for a lock.
		if src.from == nil || i%stepLen == 0 {
			u.beat.step()
		}
		msg, cut := u.in.Datagram(i)
		src.from = u.in.Peer(i)
		u.heard.add(u.r, src.from)
		if port(src.from) == 0 { // spoofed: no answer can be sent
			u.c.dropped.Add(1)
			continue
		}
		if u.wildcard {
			src.local = u.in.Control(i)
			unpinInterface(src.local)
		}
		buf := u.in.Buffer(i)
		reply, _ := u.r.work(u.s, msg, cut, &src, now, buf[:0])
		if len(reply) == 0 {
			continue
		}
		if &reply[0] != &buf[0] {
			// An answer that was cut to size had outgrown its buffer
			// before.
			copy(buf, reply)
		}
		u.out = append(u.out, u.in.Reply(i, len(reply)))
	}
	u.heard.publish()
	u.s.publish()
	if len(u.out) == 0 {
		return
	}
	if u.raw.Control(u.sendFunc) != nil { // closed meanwhile
		u.c.sendErrors.Add(uint64(len(u.out)))
	}
	u.c.duration(u.r.cache.Now()-now, uint64(len(u.out)))
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
	for out := u.out; len(out) > 0; {
		n, errno := mmsg.Send(fd, out, unix.MSG_DONTWAIT)
		switch {
		case errno == unix.EAGAIN:
			u.c.sendErrors.Add(uint64(len(out)))
			return
		case errno != 0:
			u.c.sendErrors.Add(1)
			n = 1
		}
		out = out[n:]
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
