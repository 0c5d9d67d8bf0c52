package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/dnsguard/dnsguard/bench/internal/socket"
	"github.com/dnsguard/dnsguard/internal/mmsg"
	"golang.org/x/sys/unix"
)

const (
	headerLen = 12
	// batchLen is how many datagrams move per system call. Larger batches gained
	// nothing measurable and hold answers back.
	batchLen = 64
	// maxDepth is how many queries one source port can have in flight: its ids.
	maxDepth = 1 << 16
)

// port is one source port: a connected socket and a ring of the queries in flight.
// A query's id is the low 16 bits of its sequence number, which is also its place
// in the ring; its bytes stay there until it is answered or given up.
type port struct {
	fd      int
	packets []byte // stride bytes per slot
	stride  int
	slots   []slot
	headers []mmsg.Header // per slot, for sendmmsg
	iovs    []unix.Iovec
	mask    uint32

	next   uint32 // the next query's sequence number
	unsent uint32 // the first that is filled but not sent
	oldest uint32 // none before it is in flight
}

type slot struct {
	due  int64 // when the query was to be sent, nanoseconds on the generator's clock
	size uint16
	id   uint16
	live bool
}

// newPort opens a source port towards server for depth queries in flight, each with
// a question of up to longest bytes, followed by tail.
func newPort(local netip.Addr, server netip.AddrPort, depth, longest int, tail []byte) (*port, error) {
	depth = min(1<<bits.Len(uint(depth-1)), maxDepth)
	fd, err := socket.Dial(local, server)
	if err != nil {
		return nil, err
	}
	p := &port{
		fd:      fd,
		stride:  headerLen + longest + len(tail),
		slots:   make([]slot, depth),
		headers: make([]mmsg.Header, depth),
		iovs:    make([]unix.Iovec, depth),
		mask:    uint32(depth - 1),
	}
	p.packets = make([]byte, depth*p.stride)
	for i := range p.headers {
		p.iovs[i].Base = &p.packets[i*p.stride]
		p.headers[i].Iov = &p.iovs[i]
		p.headers[i].SetIovlen(1)
	}
	return p, nil
}

func (p *port) close() error {
	if err := unix.Close(p.fd); err != nil {
		return fmt.Errorf("close socket: %w", err)
	}
	return nil
}

// full says that no further query fits the ring.
func (p *port) full() bool { return p.slots[p.next&p.mask].live }

// inFlight says that at least one query waits for its answer.
func (p *port) inFlight() bool { return p.oldest != p.next }

// fill puts the next question of ns into the ring, as due at the given time.
func (p *port) fill(ns names, tail []byte, due int64) {
	i := p.next & p.mask
	packet := p.packets[int(i)*p.stride : int(i+1)*p.stride]
	binary.BigEndian.PutUint16(packet, uint16(p.next))
	copy(packet[2:], []byte{1, 0, 0, 1, 0, 0, 0, 0, 0, 0}) // RD; one question
	n := headerLen + ns.next(packet[headerLen:])
	if len(tail) > 0 {
		packet[11] = 1
		n += copy(packet[n:], tail)
	}
	p.iovs[i].SetLen(n)
	p.slots[i] = slot{due: due, size: uint16(n - len(tail)), id: uint16(p.next), live: true}
	p.next++
}

// flush sends what was filled. It returns how many sends the kernel refused; those
// queries count as lost in due time.
func (p *port) flush() (refused uint64) {
	for p.unsent != p.next {
		i := p.unsent & p.mask
		n := min(p.next-p.unsent, uint32(len(p.slots))-i)
		sent, errno := mmsg.Send(uintptr(p.fd), p.headers[i:i+min(n, batchLen)], 0)
		// ECONNREFUSED here belongs to an earlier query, whose answer was an ICMP
		// error; reporting it has cleared it, so the same send is due again.
		if errno == unix.ECONNREFUSED {
			refused++
			continue
		}
		if errno != 0 {
			refused++
			sent = 1 // the kernel names the first of the batch; go on behind it
		}
		p.unsent += uint32(sent)
	}
	return refused
}

// verdict says what a datagram was.
type verdict uint8

const (
	answered   verdict = iota
	unexpected         // no query with that id is in flight: late or doubled
	mismatched         // not an answer to the question that was asked under that id
)

// match takes an answer to one of the port's queries and returns when that was due.
func (p *port) match(msg []byte) (due int64, v verdict) {
	if len(msg) < headerLen {
		return 0, mismatched
	}
	id := binary.BigEndian.Uint16(msg)
	i := uint32(id) & p.mask
	s := &p.slots[i]
	if !s.live || s.id != id {
		return 0, unexpected
	}
	packet := p.packets[int(i)*p.stride:]
	const qrAndOpcode = 0xf8
	if len(msg) < int(s.size) || msg[2]&qrAndOpcode != 0x80 || msg[4] != 0 || msg[5] != 1 ||
		!bytes.Equal(msg[headerLen:s.size], packet[headerLen:s.size]) {
		return 0, mismatched
	}
	s.live = false
	p.advance()
	return s.due, answered
}

// expire gives up the queries that were due before the given time.
func (p *port) expire(before int64) (lost uint64) {
	for p.oldest != p.next {
		s := &p.slots[p.oldest&p.mask]
		if s.live {
			if s.due >= before {
				break
			}
			s.live = false
			lost++
		}
		p.oldest++
	}
	return lost
}

// advance moves oldest over what is no longer in flight.
func (p *port) advance() {
	for p.oldest != p.next && !p.slots[p.oldest&p.mask].live {
		p.oldest++
	}
}
