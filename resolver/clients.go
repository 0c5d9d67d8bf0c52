package resolver

import (
	"hash/maphash"
	"net/netip"
	"sync/atomic"

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

// count counts one more for the client with the given hash.
func (s *clientSketch) count(hash uint64) {
	for i := range s.rows {
		c := &s.rows[i][uint32(hash>>(32*i))%sketchWidth] //nolint:gosec // one half each
		c.Store(c.Load() + 1)                             // cheaper than Add: one writer
	}
}

// addCells adds the client's cells to sum.
func (s *clientSketch) addCells(hash uint64, sum *[2]uint64) {
	for i := range s.rows {
		sum[i] += uint64(s.rows[i][uint32(hash>>(32*i))%sketchWidth].Load()) //nolint:gosec // one half each
	}
}

// hashPeer hashes the address in a raw socket address.
func (r *Resolver) hashPeer(sa *unix.RawSockaddrInet6) uint64 {
	if sa.Family == unix.AF_INET {
		// An IPv4 address stands at octets 4 to 8, where an IPv6 one has
		// its flow label.
		return maphash.Comparable(r.seed, sa.Flowinfo)
	}
	return maphash.Comparable(r.seed, sa.Addr)
}

func (r *Resolver) hashClient(a netip.Addr) uint64 {
	var sa unix.RawSockaddrInet6
	if a = a.Unmap(); a.Is4() {
		sa.Family = unix.AF_INET
		b := a.As4()
		sa.Flowinfo = nativeUint32(b)
	} else {
		sa.Family = unix.AF_INET6
		sa.Addr = a.As16()
	}
	return r.hashPeer(&sa)
}

// Received returns how often the client has been heard of: datagrams read over
// UDP, connections accepted over TCP. It is never too low (see clientSketch).
// Counts of endpoints that were removed are gone.
func (r *Resolver) Received(client netip.Addr, t Transport) uint64 {
	hash := r.hashClient(client)
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
