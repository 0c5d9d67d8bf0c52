package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	headerLen = 12 // RFC 1035 section 4.1.1
	// burst bounds the sends between two looks at the sockets, so that catching
	// up after a pause does not overflow their buffers.
	burst = 32
)

// generator runs one Load on the calling thread.
type generator struct {
	load      Load
	templates [][]byte
	result    *LoadResult

	epoll, timer, wake int         // file descriptors
	conns              []*loadConn // fixed sockets, by query number modulo their count
	byFD               []*loadConn // open sockets, by file descriptor
	waiting            []*loadConn // by query number: the socket that a query waits on
	oldest             int         // every query before it has ended
	pending            int         // queries sent and not ended
	start              time.Time
	now                time.Duration // since start; read once per turn
	query, answer      []byte        // scratch
}

func newGenerator(l Load, templates [][]byte) (g *generator, err error) {
	g = &generator{
		load: l, templates: templates,
		epoll: -1, timer: -1, wake: -1,
		conns:   make([]*loadConn, l.Sockets),
		waiting: make([]*loadConn, l.Queries),
		answer:  make([]byte, 1<<16),
		result: &LoadResult{
			Rcodes:   make(map[int]int),
			interval: time.Second / time.Duration(l.Rate),
			took:     make([]time.Duration, l.Queries),
		},
	}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if g.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w", err)
	}
	if g.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make a timer: %w", err)
	}
	if g.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make an event descriptor: %w", err)
	}
	for _, fd := range []int{g.timer, g.wake} {
		if err := g.watch(fd, unix.EPOLLIN); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// watch adds a descriptor to the epoll instance.
func (g *generator) watch(fd int, events uint32) error {
	if err := unix.EpollCtl(g.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return fmt.Errorf("watch a descriptor: %w", err)
	}
	return nil
}

func (g *generator) close() {
	for _, c := range g.byFD {
		if c != nil {
			g.drop(c)
		}
	}
	for _, fd := range []int{g.wake, g.timer, g.epoll} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// run sends and receives until every query has ended or ctx is done.
func (g *generator) run(ctx context.Context) error {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		_, _ = unix.Write(g.wake, binary.NativeEndian.AppendUint64(nil, 1))
	})
	defer func() {
		if !stop() {
			<-woken // close must not find the event descriptor in use
		}
	}()

	before := threadCPU()
	defer func() { g.result.CPU = threadCPU() - before }()
	var events [64]unix.EpollEvent
	g.start = time.Now()
	for {
		g.now = time.Since(g.start)
		for range burst {
			if g.result.Sent == g.load.Queries || g.due(g.result.Sent) > g.now {
				break
			}
			if err := g.send(g.result.Sent); err != nil {
				return err
			}
		}
		g.result.Elapsed = g.now
		if g.result.Sent == g.load.Queries && g.pending == 0 {
			return nil
		}
		wait, err := g.arm()
		if err != nil {
			return err
		}
		n, err := unix.EpollWait(g.epoll, events[:], wait)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for sockets: %w", err)
		}
		g.now = time.Since(g.start)
		g.expire() // first: an answer that comes too late is none
		for _, e := range events[:max(n, 0)] {
			switch fd := int(e.Fd); {
			case fd == g.wake:
				return ctx.Err()
			case fd == g.timer:
			case g.byFD[fd] != nil: // else closed earlier in this turn
				g.ready(g.byFD[fd], e.Events)
			}
		}
	}
}

// threadCPU is the CPU time of the calling thread, in user and kernel.
func threadCPU() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// due is when a query is to be sent.
func (g *generator) due(number int) time.Duration {
	return time.Duration(number) * g.result.interval
}

// arm sets the timer to the next thing to do; the returned timeout for epoll is
// 0 if that is now, else -1. Setting the timer also clears its last expiry, so
// it need not be read.
func (g *generator) arm() (int, error) {
	next := g.due(g.oldest) + g.load.Timeout
	if g.result.Sent < g.load.Queries {
		next = min(next, g.due(g.result.Sent))
	}
	wait := next - time.Since(g.start)
	if wait <= 0 {
		return 0, nil
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(wait))}
	if err := unix.TimerfdSettime(g.timer, 0, &spec, nil); err != nil {
		return 0, fmt.Errorf("set the timer: %w", err)
	}
	return -1, nil
}

// compose writes the query with the given number into scratch space.
func (g *generator) compose(number int) []byte {
	g.query = append(g.query[:0], g.templates[number%len(g.templates)]...)
	binary.BigEndian.PutUint16(g.query, uint16(number))
	if g.load.Unique {
		label := g.query[headerLen+1 : headerLen+1+uniqueDigits]
		var digits [uniqueDigits + 12]byte
		written := strconv.AppendInt(digits[:0], int64(number), 10)
		copy(label, "00000000")
		copy(label[max(0, len(label)-len(written)):], written)
	}
	return g.query
}

// send sends one query on its socket.
func (g *generator) send(number int) error {
	c, err := g.connFor(number)
	refused := errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET)
	if err != nil && !refused {
		return err
	}
	g.result.Sent++
	g.result.took[number] = notAnswered
	if refused { // by a TCP server so near that connect already knows
		g.result.Refused++
		g.result.Lost++
		return nil
	}
	g.pending++
	g.waiting[number] = c
	c.inFlight++
	g.write(c, g.compose(number))
	return nil
}

// end takes a query off its socket. A socket made for it goes with it.
func (g *generator) end(number int) {
	c := g.waiting[number]
	g.waiting[number] = nil
	g.pending--
	c.inFlight--
	if c.fresh {
		g.drop(c)
	}
}

// expire gives up the queries whose time is over.
func (g *generator) expire() {
	for g.oldest < g.result.Sent {
		if g.waiting[g.oldest] != nil {
			if g.due(g.oldest)+g.load.Timeout > g.now {
				return
			}
			g.lose(g.oldest)
		}
		g.oldest++
	}
}

func (g *generator) lose(number int) {
	g.result.Lost++
	g.end(number)
}

// receive judges one answer that came on a socket.
func (g *generator) receive(c *loadConn, answer []byte) {
	r := g.result
	if len(answer) < headerLen || r.Sent == 0 {
		r.Stray++
		return
	}
	// The last query sent with this id: fewer are in flight than there are ids.
	last := r.Sent - 1
	number := last - (last-int(binary.BigEndian.Uint16(answer)))&(idSpace-1)
	if number < 0 || g.waiting[number] != c {
		r.Stray++
		return
	}
	const (
		response  = 0x80 // in the third octet
		truncated = 0x02
		rcode     = 0x0f // in the fourth
	)
	question := g.compose(number)[headerLen:]
	switch code := int(answer[3] & rcode); {
	case answer[2]&response == 0, !bytes.HasPrefix(answer[headerLen:], question):
		r.Wrong++
	case code != 0:
		r.Rcodes[code]++
	case answer[2]&truncated != 0, binary.BigEndian.Uint16(answer[6:]) == 0:
		r.Wrong++
	default:
		r.Answered++
		r.took[number] = g.now - g.due(number)
	}
	g.end(number)
}
