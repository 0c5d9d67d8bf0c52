package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// hostileZone is the upstream's that does its worst, route to it with
// upstreamsWith.
const hostileZone = "hostile.example."

// hostile is a server that does what a name's second label says:
//
//	N.silent.hostile.example.   nothing
//	N.big.hostile.example.      an answer that fills a datagram
//	N.huge.hostile.example.     TC, and 64 KB over TCP, many at the same time
//	N.garbage.hostile.example.  one of many things that are no answer
//
// It is quicker than the stand-ins: what it costs is not to be what bounds a
// flood.
type hostile struct {
	addr   netip.AddrPort
	closed context.CancelFunc
	ctx    context.Context
	udp    net.PacketConn
	tcp    net.Listener
	wg     sync.WaitGroup
	asked  atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
}

// addHostile adds a pod with one.
func (n *node) addHostile() *hostile {
	n.t.Helper()
	pod := labtest.AddPod(n.t, n.Lab, "hostile")
	h := &hostile{addr: netip.AddrPortFrom(pod.IP4, dnsPort), conns: map[net.Conn]bool{}}
	h.ctx, h.closed = context.WithCancel(n.t.Context())
	var err error
	if h.udp, err = pod.ListenPacket(n.t.Context(), "udp", h.addr.String()); err != nil {
		n.t.Fatal(err)
	}
	if h.tcp, err = pod.Listen(n.t.Context(), "tcp", h.addr.String()); err != nil {
		n.t.Fatal(err)
	}
	h.wg.Go(h.serveUDP)
	h.wg.Go(h.serveTCP)
	n.t.Cleanup(h.close)
	return h
}

func (h *hostile) close() {
	h.closed()
	h.udp.Close()
	h.tcp.Close()
	h.mu.Lock()
	for c := range h.conns {
		c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// upstreams is the configuration line that leads the zone to it.
func (h *hostile) upstreams() string {
	return `upstreams: [{zones: ["."], servers: [service]}, {zones: [` + hostileZone[:len(hostileZone)-1] + `], servers: ["` + h.addr.String() + `"]}]`
}

// question returns the end of a query's question, and its second label.
func question2(msg []byte) (end int, label string) {
	at := 12
	for i := 0; at < len(msg) && msg[at] != 0; i++ {
		n := int(msg[at])
		if at+1+n > len(msg) {
			return 0, ""
		}
		if i == 1 {
			label = string(msg[at+1 : at+1+n])
		}
		at += 1 + n
	}
	return min(at+5, len(msg)), label
}

// textAnswer answers the query with about size octets, with a TTL of 5 min.
func textAnswer(query []byte, end, size int) []byte {
	out := make([]byte, 0, size+300)
	out = append(out, query[:end]...)
	binary.BigEndian.PutUint16(out[2:], 0x8180) // QR, RD, RA
	copy(out[4:], []byte{0, 1, 0, 1, 0, 0, 0, 0})
	out = append(out, 0xc0, 12)
	out = append(out, query[end-4:end]...)
	out = binary.BigEndian.AppendUint32(out, 300)
	at := len(out)
	out = append(out, 0, 0)
	for len(out) < size-1 {
		n := min(250, size-1-len(out))
		out = append(out, byte(n))
		out = append(out, make([]byte, n)...)
	}
	binary.BigEndian.PutUint16(out[at:], uint16(len(out)-at-2))
	return out
}

func (h *hostile) serveUDP() {
	buf := make([]byte, 4096)
	for {
		n, from, err := h.udp.ReadFrom(buf)
		if err != nil {
			return
		}
		h.asked.Add(1)
		query := buf[:n]
		end, label := question2(query)
		if end < 17 {
			continue
		}
		switch label {
		case "silent":
		case "huge":
			reply := append([]byte(nil), query[:end]...)
			binary.BigEndian.PutUint16(reply[2:], 0x8380) // and TC
			copy(reply[4:], []byte{0, 1, 0, 0, 0, 0, 0, 0})
			_, _ = h.udp.WriteTo(reply, from)
		case "garbage":
			for _, reply := range garbage(query, end) {
				_, _ = h.udp.WriteTo(reply, from)
			}
		default:
			_, _ = h.udp.WriteTo(textAnswer(query, end, 1200), from)
		}
	}
}

// garbage is what comes back instead of an answer: one of the kinds for each
// name.
func garbage(query []byte, end int) [][]byte {
	good := textAnswer(query, end, 400)
	kinds := []func() []byte{
		func() []byte { return good[:end+3] }, // ends within a record
		func() []byte { good[0] ^= 0xff; return good },
		func() []byte { good[13] ^= 1; return good },                                                 // another question
		func() []byte { good[7] = 200; return good },                                                 // 200 records announced
		func() []byte { good[len(good)-1]++; good[end], good[end+1] = 0xc0, byte(end); return good }, // a pointer to itself
		func() []byte { return make([]byte, 1500) },
		func() []byte { return query },                     // an echo
		func() []byte { return query[:5] },                 // not even a header
		func() []byte { good[2] &^= 0x80; return good },    // no response
		func() []byte { good[3] |= 5; return good[:12] },   // REFUSED, without a question
		func() []byte { good[end+10] = 0xff; return good }, // longer than the message
		func() []byte { return nil },
	}
	return [][]byte{kinds[int(query[19]+query[20])%len(kinds)]()} // the last digits of a unique name
}

// serveTCP takes questions in for a moment and then answers all at once.
func (h *hostile) serveTCP() {
	for {
		c, err := h.tcp.Accept()
		if err != nil {
			return
		}
		h.mu.Lock()
		h.conns[c] = true
		h.mu.Unlock()
		h.wg.Go(func() {
			h.serveConn(c)
			h.mu.Lock()
			delete(h.conns, c)
			h.mu.Unlock()
			c.Close()
		})
	}
}

func (h *hostile) serveConn(c net.Conn) {
	queries := make(chan []byte, 1024)
	h.wg.Go(func() {
		defer close(queries)
		for {
			var head [2]byte
			if _, err := io.ReadFull(c, head[:]); err != nil {
				return
			}
			query := make([]byte, binary.BigEndian.Uint16(head[:]))
			if _, err := io.ReadFull(c, query); err != nil {
				return
			}
			h.asked.Add(1)
			queries <- query
		}
	})
	defer func() {
		for range queries { // until the reader has ended
		}
	}()
	defer c.Close()
	for query := range queries {
		select { // hold the first back until others have come
		case <-time.After(200 * time.Millisecond):
		case <-h.ctx.Done():
			return
		}
		for more := true; more; {
			if end, label := question2(query); end >= 17 && label != "silent" {
				size := 1200
				if label == "huge" {
					size = 65000
				}
				msg := textAnswer(query, end, size)
				if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...)); err != nil {
					return
				}
			}
			select {
			case query, more = <-queries:
			default:
				more = false
			}
		}
	}
}

// manyAddresses lets a pod send from, and receive at, every address of
// 10.245.0.0/16, and returns them one after the other.
func (n *node) manyAddresses(pod *lab.Pod) func() netip.Addr {
	n.t.Helper()
	all := &net.IPNet{IP: net.IPv4(10, 245, 0, 0).To4(), Mask: net.CIDRMask(16, 32)}
	err := pod.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(lo), netlink.RouteAdd(&netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: all, Type: 2, Table: 255, Scope: netlink.SCOPE_HOST, // RTN_LOCAL
		}))
	})
	if err == nil {
		err = n.Node.Do(func() error {
			to, err := netlink.RouteGet(pod.IP4.AsSlice())
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{
				LinkIndex: to[0].LinkIndex, Dst: all, Gw: pod.IP4.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
			})
		})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	var count atomic.Uint32
	return func() netip.Addr {
		i := count.Add(1)
		return netip.AddrFrom4([4]byte{10, 245, byte(i >> 8), byte(i)})
	}
}

// dialFrom opens a TCP connection from an address, with a small receive buffer.
func dialFrom(ctx context.Context, pod *lab.Pod, from netip.Addr, to netip.AddrPort) (conn net.Conn, err error) {
	err = pod.Do(func() error {
		d := net.Dialer{Timeout: 2 * time.Second}
		if from.IsValid() {
			d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
		}
		var err error
		if conn, err = d.DialContext(ctx, "tcp", to.String()); err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(4096)
		}
		return err
	})
	return conn, err
}

// pipeline is n framed queries for a name.
func pipeline(t *testing.T, name string, qtype uint16, n int) []byte {
	t.Helper()
	query, err := new(dns.Msg).SetQuestion(name, qtype).Pack()
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	for range n {
		out = append(binary.BigEndian.AppendUint16(out, uint16(len(query))), query...)
	}
	return out
}
