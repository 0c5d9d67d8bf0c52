package resolver

import (
	"hash/maphash"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// clientSketch counts what was received from each client address, roughly and
// in bounded memory: a count-min sketch (Cormode and Muthukrishnan, 2005) of
// two rows. A count is never too low; it is too high for a client that shares
// its cell with another one in both rows: 1 in 16 million for two clients.
//
// It has one writer, the reader or acceptor that owns it; others read.
type clientSketch struct {
	rows [2][sketchWidth]atomic.Uint32
}

const sketchWidth = 4096 // 32 KiB a sketch; a node has some hundred clients

// count counts n more for the client with the given hash.
func (s *clientSketch) count(hash uint64, n uint32) {
	for i := range s.rows {
		c := &s.rows[i][uint32(hash>>(32*i))%sketchWidth] //nolint:gosec // one half each
		c.Store(c.Load() + n)                             // not Add: there is one writer
	}
}

// addCells adds the client's cells to sum.
func (s *clientSketch) addCells(hash uint64, sum *[2]uint64) {
	for i := range s.rows {
		sum[i] += uint64(s.rows[i][uint32(hash>>(32*i))%sketchWidth].Load()) //nolint:gosec // one half each
	}
}

// hearing counts datagrams of one client that come one after the other as one:
// under load they often do, and to hash an address and count it once costs about
// a tenth of a hit. What it has is published at the end of a batch.
type hearing struct {
	sketch *clientSketch
	addr   [16]byte
	hash   uint64
	n      uint32 // heard of addr since it was published
}

// add counts a datagram from a raw socket address.
func (h *hearing) add(r *Resolver, from *unix.RawSockaddrInet6) {
	addr := from.Addr
	if from.Family == unix.AF_INET {
		addr = [16]byte{10: 0xff, 11: 0xff} // RFC 4291 section 2.5.5.2, as netip.Addr.As16 has it
		copy(addr[12:], (*unix.RawSockaddrInet4)(unsafe.Pointer(from)).Addr[:])
	}
	if h.n == 0 || addr != h.addr {
		h.publish()
		h.addr, h.hash = addr, r.hashClient(addr)
	}
	h.n++
}

// publish adds what was heard to the sketch.
func (h *hearing) publish() {
	if h.n > 0 {
		h.sketch.count(h.hash, h.n)
		h.n = 0
	}
}

// hashClient hashes an address, an IPv4 one in its IPv4-mapped form.
func (r *Resolver) hashClient(addr [16]byte) uint64 { return maphash.Comparable(r.seed, addr) }

// Received returns how often the client has been heard of: datagrams read over
// UDP, connections accepted over TCP. It is never too low (see clientSketch).
// Counts of endpoints that were removed are gone.
func (r *Resolver) Received(client netip.Addr, t Transport) uint64 {
	hash := r.hashClient(client.As16())
	var sum [2]uint64
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, svc := range r.serving {
		switch t {
		case UDP:
			for _, u := range svc.readers {
				u.clients.addCells(hash, &sum)
			}
		case TCP:
			for _, a := range svc.acceptors {
				a.clients.addCells(hash, &sum)
			}
		}
	}
	return min(sum[0], sum[1])
}
