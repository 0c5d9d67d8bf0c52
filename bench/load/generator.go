package main

import (
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/dnsguard/dnsguard/internal/mmsg"
	"golang.org/x/sys/unix"
)

// options is what a generator does, apart from for how long.
type options struct {
	server      netip.AddrPort
	local       netip.Addr
	sourcePorts int
	window      int           // closed loop: queries in flight, all ports together
	rate        float64       // open loop: queries per second; 0 means closed loop
	timeout     time.Duration // an answer later than this is lost
	busy        bool          // never sleep
	tail        []byte        // what follows the question: an OPT record or nothing
}

// generator asks one server from one thread.
type generator struct {
	options
	names  names
	ports  []*port
	polls  []unix.PollFd
	inbox  *mmsg.Batch
	base   time.Time
	turn   int // the port that the open loop uses next
	flight int
}

func newGenerator(o options, ns names) (*generator, error) {
	inFlight := o.window
	if o.rate > 0 {
		inFlight = int(o.rate*o.timeout.Seconds()) + batchLen
	}
	// Twice what is needed, since one late answer holds its slot while others turn.
	depth := max(2*(inFlight/o.sourcePorts+1), batchLen)
	g := &generator{
		options: o,
		names:   ns,
		// Room for the largest answer that is asked for, at EDNS size 1232.
		inbox: mmsg.NewBatch(mmsg.Config{Len: batchLen, Size: 1232}),
		base:  time.Now(),
	}
	longest := ns.longest()
	for range o.sourcePorts {
		p, err := newPort(o.local, o.server, depth, longest, o.tail)
		if err != nil {
			g.close()
			return nil, err
		}
		g.ports = append(g.ports, p)
		g.polls = append(g.polls, unix.PollFd{Fd: int32(p.fd), Events: unix.POLLIN})
	}
	// Timers may be late by 50 us by default, as much as the latencies to be measured.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		g.close()
		return nil, fmt.Errorf("set timer slack: %w", err)
	}
	return g, nil
}

func (g *generator) close() {
	for _, p := range g.ports {
		_ = p.close()
	}
}

// now is the generator's clock, in nanoseconds.
func (g *generator) now() int64 { return int64(time.Since(g.base)) }

// run asks for the given time, or n questions if n is not zero, whichever ends
// first; then it waits for what is still in flight. Every query that it sent is
// answered, or counted as lost, when it returns. during, if not nil, is called at
// the end of the time, before the wait.
func (g *generator) run(duration time.Duration, n uint64, during func()) *result {
	r := &result{Rcodes: map[string]uint64{}}
	start := g.now()
	end := start + int64(duration)
	sweep := start
	sending := true
	for {
		now := g.now()
		if sending && (now >= end || n > 0 && r.Sent >= n) {
			sending = false
			r.elapsed = time.Duration(now - start)
			r.answeredInTime = r.Answered
			if during != nil {
				during()
			}
		}
		next := now + int64(g.timeout)
		if sending {
			next = g.send(r, start, now, n)
		}
		got := g.receive(r)
		if now-sweep > int64(g.timeout)/8 {
			sweep = now
			for _, p := range g.ports {
				lost := p.expire(now - int64(g.timeout))
				r.Lost += lost
				g.flight -= int(lost)
			}
		}
		if !sending && g.flight == 0 {
			return r
		}
		if got == 0 && !g.busy {
			g.wait(time.Duration(min(next-g.now(), int64(g.timeout)/8)))
		}
	}
}

// send asks what is due, and returns when the next query will be.
func (g *generator) send(r *result, start, now int64, n uint64) (next int64) {
	if g.rate > 0 {
		next = g.sendByRate(r, start, now, n)
	} else {
		next = g.sendByWindow(r, now, n)
	}
	for _, p := range g.ports {
		r.Refused += p.flush()
	}
	return next
}

// sendByWindow keeps window queries in flight, spread evenly over the ports.
func (g *generator) sendByWindow(r *result, now int64, n uint64) (next int64) {
	for blocked := 0; g.flight < g.window && blocked < len(g.ports); {
		if n > 0 && r.Sent >= n {
			break
		}
		p := g.ports[g.turn]
		g.turn = (g.turn + 1) % len(g.ports)
		if p.full() {
			blocked++
			continue
		}
		blocked = 0
		g.fill(p, r, now)
	}
	return now + int64(g.timeout)
}

// sendByRate asks every query whose time has come. A query keeps the time at which
// it was scheduled even if it leaves late, so that a stall of the server, or of this
// process, shows in every latency that it touched.
func (g *generator) sendByRate(r *result, start, now int64, n uint64) (next int64) {
	for {
		due := start + int64(float64(r.Sent)/g.rate*float64(time.Second))
		if due > now || n > 0 && r.Sent >= n {
			return due
		}
		p := g.ports[g.turn]
		g.turn = (g.turn + 1) % len(g.ports)
		if p.full() {
			return now + int64(time.Millisecond)
		}
		g.fill(p, r, due)
	}
}

func (g *generator) fill(p *port, r *result, due int64) {
	p.fill(g.names, g.tail, due)
	r.Sent++
	g.flight++
}

// receive takes what has arrived on every port and returns how many datagrams.
func (g *generator) receive(r *result) (got int) {
	for _, p := range g.ports {
		if !p.inFlight() {
			continue
		}
		n, errno := g.inbox.Recv(uintptr(p.fd), unix.MSG_DONTWAIT)
		if errno != 0 {
			if errno != unix.EAGAIN {
				r.Refused++
			}
			continue
		}
		now := g.now()
		for i := range n {
			msg, _ := g.inbox.Datagram(i)
			due, v := p.match(msg)
			switch v {
			case answered:
				g.flight--
				r.answer(msg, time.Duration(now-due))
			case unexpected:
				r.Unexpected++
			case mismatched:
				r.Mismatched++
			}
		}
		got += n
	}
	return got
}

// wait sleeps until an answer arrives, or for d.
func (g *generator) wait(d time.Duration) {
	if d <= 0 {
		return
	}
	ts := unix.NsecToTimespec(int64(d))
	// Raw, like everything here: nothing else needs the processor.
	_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(g.polls))),
		uintptr(len(g.polls)), uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
}
