package resolver

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Limits of one TCP connection.
const (
	// maxQueryLen bounds a query over TCP. Queries have no use for more; a
	// larger frame is not DNS, and the connection is closed.
	maxQueryLen = 4096
	// maxPipelined bounds the queries of one connection that are under
	// way; a client that pipelines more is read no further until answers
	// have been given (RFC 7766 section 6.2.1.1 asks for pipelining and
	// leaves the number open).
	maxPipelined = 128
	// maxOutput is from how many octets of answers on a connection is read no
	// further until its client has taken them: 200 usual ones, or a large one.
	maxOutput = 16 << 10
	// keepOutput is the largest output buffer that a connection keeps while
	// it has nothing to write.
	keepOutput = 4 << 10
	// frameTimeout is how long a query may take from its first octet to
	// its last: a round trip and a retransmission, not a trickle.
	frameTimeout = 2 * time.Second
	// writeTimeout is how long a client may take for writeChunk octets: the
	// slowest link is faster, a closed window is not.
	writeTimeout = 2 * time.Second
	writeChunk   = 16 << 10
	// drainRead is how long a connection that is being drained waits for
	// octets that are already on this machine, and drainFirst for those of a
	// client that has connected and not asked yet.
	drainRead  = 20 * time.Millisecond
	drainFirst = 250 * time.Millisecond
)

// tcpConn serves one TCP connection: a reader goroutine, and a writer while
// answers are waiting to be written. Answers go out in the order in which they
// are found, not asked (RFC 7766 section 7).
type tcpConn struct {
	r    *Resolver
	conn net.Conn
	peer netip.AddrPort
	s    *scratch

	mu      sync.Mutex
	changed *sync.Cond // owed, writing or broken changed
	out     []byte     // answers not yet written, each with its length
	unsent  int        // octets of out and of what is being written
	owed    int        // queries that wait in flights
	writing bool
	broken  bool
	drain   bool
	stopped bool      // nothing more is read
	asked   bool      // something was read
	idle    bool      // waits for the next query, for as long as usual
	since   time.Time // of the last whole query, or the connection
}

func newTCPConn(r *Resolver, conn net.Conn, peer netip.AddrPort, c *counters) *tcpConn {
	t := &tcpConn{r: r, conn: conn, peer: peer, s: newScratch(c), since: time.Now()}
	t.changed = sync.NewCond(&t.mu)
	return t
}

// run reads queries until the client closes, is idle for too long or breaks
// the rules; it returns when every query that was read has been answered and
// written.
func (t *tcpConn) run() {
	br := bufio.NewReaderSize(t.conn, 1024)
	var frame []byte
	for {
		if br.Buffered() == 0 {
			t.flush()
		}
		var err error
		if frame, err = t.readFrame(br, frame[:0]); err != nil {
			break
		}
		t.serve(frame)
	}
	t.mu.Lock()
	for (t.owed > 0 || t.writing || len(t.out) > 0) && !t.broken {
		t.flushLocked()
		t.changed.Wait()
	}
	if !t.broken {
		t.abort()
	}
	t.mu.Unlock()
	_ = t.conn.Close()
}

// startDrain tells the reader to stop as soon as nothing more is there to be
// read.
func (t *tcpConn) startDrain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drain = true
	t.deadlineLocked(drainFirst)
}

// makeRoom shortens the time that an idle connection has, once.
func (t *tcpConn) makeRoom() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.idle {
		t.idle = false
		t.deadlineLocked(idleCrowded)
	}
}

// useless returns since when nothing has come of the connection: neither a whole
// query nor an answer that is on its way. It reports false if something has, just
// now.
func (t *tcpConn) useless(now time.Time) (since time.Time, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.since, !t.broken && t.owed == 0 && !t.writing && len(t.out) == 0 && now.Sub(t.since) >= leastUse
}

// stop tells the reader to read nothing more; what it has read is answered.
func (t *tcpConn) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stopped = true
	_ = t.conn.SetReadDeadline(time.Unix(1, 0))
}

// giveUp ends the connection at once.
func (t *tcpConn) giveUp() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.abort()
}

// deadline sets the time that the next octets may take.
func (t *tcpConn) deadline(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deadlineLocked(d)
}

func (t *tcpConn) deadlineLocked(d time.Duration) {
	switch {
	case t.broken || t.stopped:
		return // the time is up, and stays so
	case t.drain && t.asked:
		d = min(d, drainRead)
	case t.drain:
		d = min(d, drainFirst)
	}
	_ = t.conn.SetReadDeadline(time.Now().Add(d))
}

// first waits for the first octet of a query. Where the time is up but octets
// are there, they came in time: it is this goroutine that is late.
func (t *tcpConn) first(br *bufio.Reader) error {
	for {
		d := t.r.conns.idle()
		t.mu.Lock()
		t.idle = true
		t.deadlineLocked(d)
		t.mu.Unlock()
		_, err := br.Peek(1)
		t.mu.Lock()
		t.idle = false
		t.asked = t.asked || err == nil
		over := t.broken || t.stopped
		t.mu.Unlock()
		c, ok := t.conn.(syscall.Conn)
		if err == nil || over || !ok || !errors.Is(err, os.ErrDeadlineExceeded) || !readable(c) {
			return err
		}
	}
}

var errFrame = errors.New("frame length of no DNS query")

// readFrame reads one message (RFC 1035 section 4.2.2) into buf. The time
// between queries and the time within one are bounded apart, so that neither
// silence nor a trickle holds a connection.
func (t *tcpConn) readFrame(br *bufio.Reader, buf []byte) ([]byte, error) {
	if br.Buffered() == 0 {
		if err := t.first(br); err != nil {
			return nil, err
		}
	}
	timed := false
	if br.Buffered() < 2 {
		t.deadline(frameTimeout)
		timed = true
	}
	head, err := br.Peek(2)
	if err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(head))
	if n < dnswire.HeaderLen || n > maxQueryLen {
		return nil, errFrame
	}
	_, _ = br.Discard(2)
	if br.Buffered() < n && !timed {
		t.deadline(frameTimeout)
	}
	if cap(buf) < n {
		buf = make([]byte, max(n, 512))
	}
	buf = buf[:n]
	_, err = io.ReadFull(br, buf)
	return buf, err
}

// serve answers one query, or leaves it to its flight.
func (t *tcpConn) serve(msg []byte) {
	t.mu.Lock()
	t.since = time.Now()
	for (t.owed >= maxPipelined || len(t.out) >= maxOutput) && !t.broken {
		t.flushLocked()
		t.changed.Wait()
	}
	t.mu.Unlock()

	if t.r.conns.beginWork() {
		defer t.r.conns.endWork()
	}
	now := t.r.cache.Now()
	src := source{transport: TCP, replier: t, peer: t.peer}
	buf := t.r.buffers.Get().(*[]byte)
	reply, waits := t.r.answer(t.s, msg, false, &src, now, (*buf)[:2])
	if !waits {
		t.mu.Lock()
		if len(reply) > 2 {
			t.enqueue(reply[2:])
		}
		t.mu.Unlock()
		t.s.c.duration(t.r.cache.Now()-now, 1)
	}
	*buf = reply
	t.r.buffers.Put(buf)
}

// owe counts a query that waits in a flight.
func (t *tcpConn) owe() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.owed++
}

// reply takes the answer of a flight.
func (t *tcpConn) reply(_ *waiter, msg []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.owed--
	t.enqueue(msg)
	t.flushLocked()
	t.changed.Broadcast()
}

// enqueue appends an answer to the output; the caller holds mu. Once the output
// of all connections is too much, those that have most of it are given up.
func (t *tcpConn) enqueue(msg []byte) {
	if t.broken {
		return
	}
	n := 2 + len(msg)
	if !t.r.conns.reserve(n, t.unsent) {
		t.s.c.shed[ShedOutput].Add(1)
		t.abort()
		return
	}
	t.unsent += n
	t.out = binary.BigEndian.AppendUint16(t.out, uint16(len(msg))) //nolint:gosec // a DNS message
	t.out = append(t.out, msg...)
}

// flush has what is in the output written.
func (t *tcpConn) flush() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flushLocked()
}

func (t *tcpConn) flushLocked() {
	if len(t.out) > 0 && !t.writing && !t.broken {
		t.writing = true
		go t.write()
	}
}

// write writes the output until there is none. It is a goroutine of its own,
// so that a client that reads slowly stalls neither a flight nor its own
// queries.
func (t *tcpConn) write() {
	var buf []byte
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.out) > 0 && !t.broken {
		buf, t.out = t.out, buf[:0]
		t.changed.Broadcast() // there is room
		t.mu.Unlock()
		err := t.writeAll(buf)
		t.mu.Lock()
		t.release(len(buf))
		if err != nil {
			t.abort()
		}
	}
	if cap(t.out) > keepOutput {
		t.out = nil
	}
	t.writing = false
	t.changed.Broadcast()
}

// writeAll writes b, as slowly as the client takes it.
func (t *tcpConn) writeAll(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), writeChunk)
		_ = t.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
		if _, err := t.conn.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// release gives room for n octets of output back; the caller holds mu.
func (t *tcpConn) release(n int) {
	t.unsent -= n
	t.r.conns.unreserve(n)
}

// abort gives the connection up; the caller holds mu. The reader, which owns
// it, wakes and closes it.
func (t *tcpConn) abort() {
	t.broken = true
	t.release(len(t.out))
	t.out = nil
	_ = t.conn.SetDeadline(time.Unix(1, 0))
	t.changed.Broadcast()
}
