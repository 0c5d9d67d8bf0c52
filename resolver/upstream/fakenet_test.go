package upstream

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// fakeNet is a network of scripted servers, for bubbles of synctest: its
// sockets are fakeConns, and it delivers after delays of virtual time.
type fakeNet struct {
	t       *testing.T
	servers map[netip.AddrPort]func(*fakeQuery)
	dialing func(network string, server netip.AddrPort) error // may sleep
	writing func(c *fakeConn) error                           // before each write

	scripts sync.Mutex // held while one runs

	mu    sync.Mutex
	conns []*fakeConn
	seen  []*fakeQuery
	open  int
}

// newFakeNet returns a network of the given servers, named by their last octet.
func newFakeNet(t *testing.T, servers ...func(*fakeQuery)) *fakeNet {
	n := &fakeNet{t: t, servers: make(map[netip.AddrPort]func(*fakeQuery))}
	for i, script := range servers {
		n.servers[addr(i+1)] = script
	}
	return n
}

// become gives a server another script, also while questions are under way.
func (n *fakeNet) become(server netip.AddrPort, script func(*fakeQuery)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.servers[server] = script
}

func addr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 53)
}

// forwarder returns a Forwarder on the network whose root route has all of its
// servers in order, unless config says otherwise.
func (n *fakeNet) forwarder(config Config) *Forwarder {
	n.t.Helper()
	config.Dial = n.dial
	if config.Routes == nil {
		config.Routes = []Route{{Zones: []string{"."}}}
	}
	for i := range config.Routes {
		if config.Routes[i].Servers == nil {
			for s := range len(n.servers) {
				config.Routes[i].Servers = append(config.Routes[i].Servers, Server{Addr: addr(s + 1)})
			}
		}
	}
	f, err := New(config)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		f.Close()
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.open != 0 {
			n.t.Errorf("%d sockets left open after Close", n.open)
		}
	})
	return f
}

func (n *fakeNet) dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if n.dialing != nil {
		if err := n.dialing(network, to); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	c := &fakeConn{net: n, network: network, server: to, number: len(n.conns), in: make(chan []byte, 256), errs: make(chan error, 256), gone: make(chan struct{})}
	n.conns = append(n.conns, c)
	n.open++
	return c, nil
}

// queries returns what the servers have received.
func (n *fakeNet) queries() []*fakeQuery {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]*fakeQuery(nil), n.seen...)
}

// count returns how many queries a server has received over a network: not those
// that icmp refused.
func (n *fakeNet) count(to netip.AddrPort, network string) int {
	count := 0
	for _, q := range n.queries() {
		if q.conn.server == to && q.conn.network == network && !q.refused {
			count++
		}
	}
	return count
}

// fakeQuery is a query that a server has received.
type fakeQuery struct {
	*dns.Msg
	wire    []byte
	conn    *fakeConn
	at      time.Time
	refused bool // and not received
	nth     int  // on this socket, from 0
}

func (q *fakeQuery) tcp() bool { return q.conn.network == "tcp" }

// good returns the right answer to the query.
func (q *fakeQuery) good() *dns.Msg {
	m := new(dns.Msg).SetReply(q.Msg)
	m.RecursionAvailable = true
	m.Answer = []dns.RR{&dns.A{
		Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 30},
		A:   net.IPv4(203, 0, 113, 1),
	}}
	if q.IsEdns0() != nil {
		m.SetEdns0(1232, false)
	}
	return m
}

// rcode returns an answer without records.
func (q *fakeQuery) rcode(rcode int) *dns.Msg { return new(dns.Msg).SetRcode(q.Msg, rcode) }

// reply sends an answer after a delay.
func (q *fakeQuery) reply(after time.Duration, m *dns.Msg) { q.raw(after, pack(q.conn.net.t, m)) }

// raw sends octets after a delay, as one datagram or in one frame.
func (q *fakeQuery) raw(after time.Duration, msg []byte) {
	if q.tcp() {
		msg = append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...)
	}
	q.octets(after, msg)
}

// octets sends octets after a delay, as they are.
func (q *fakeQuery) octets(after time.Duration, msg []byte) {
	q.later(after, func() {
		select {
		case q.conn.in <- msg:
		case <-q.conn.gone:
		}
	})
}

// refuse makes the socket fail after a delay, as an ICMP error or a reset does.
func (q *fakeQuery) refuse(after time.Duration, err error) {
	q.later(after, func() {
		q.conn.once.Do(func() {
			q.conn.err = err
			close(q.conn.gone)
		})
	})
}

// icmp makes the socket's next read fail after a delay, as an ICMP error does
// that is about one datagram: nobody has received the query. It quotes so many
// octets of it.
func (q *fakeQuery) icmp(after time.Duration, quoted int) {
	q.refused = true
	q.later(after, func() {
		q.conn.errs <- &bounce{syscall.ECONNREFUSED, q.wire[:min(quoted, len(q.wire))]}
	})
}

func (q *fakeQuery) later(after time.Duration, do func()) {
	if after == 0 {
		do()
		return
	}
	time.AfterFunc(after, do)
}

func pack(t *testing.T, m *dns.Msg) []byte {
	t.Helper()
	msg, err := m.Pack()
	if err != nil {
		t.Error(err)
	}
	return msg
}

// Scripts of servers.

func healthy(after time.Duration) func(*fakeQuery) {
	return func(q *fakeQuery) { q.reply(after, q.good()) }
}

func blackHole(*fakeQuery) {}

func refusing(q *fakeQuery) { q.refuse(0, syscall.ECONNREFUSED) }

// fakeConn is one end of a socket.
type fakeConn struct {
	net     *fakeNet
	network string
	server  netip.AddrPort
	number  int
	in      chan []byte
	errs    chan error // each fails one read
	rest    []byte     // of a stream
	nth     int
	once    sync.Once
	gone    chan struct{} // closed by either side, err says why
	err     error
	closed  bool
}

func (c *fakeConn) Read(b []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(b, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	select {
	case msg := <-c.in:
		return c.got(b, msg), nil
	default:
	}
	select {
	case msg := <-c.in:
		return c.got(b, msg), nil
	case err := <-c.errs:
		return 0, err
	case <-c.gone:
		return 0, c.err
	}
}

func (c *fakeConn) got(b, msg []byte) int {
	n := copy(b, msg)
	if c.network == "tcp" {
		c.rest = msg[n:]
	}
	return n
}

func (c *fakeConn) Write(b []byte) (int, error) {
	select {
	case <-c.gone:
		return 0, c.err
	default:
	}
	if c.net.writing != nil {
		if err := c.net.writing(c); err != nil {
			return 0, err
		}
	}
	if c.network == "udp" {
		c.query(b)
		return len(b), nil
	}
	for rest := b; len(rest) > 0; {
		n := 2 + int(binary.BigEndian.Uint16(rest))
		c.query(rest[2:n])
		rest = rest[n:]
	}
	return len(b), nil
}

// query hands a query to the server's script.
func (c *fakeConn) query(msg []byte) {
	m := new(dns.Msg)
	if err := m.Unpack(msg); err != nil {
		c.net.t.Errorf("query %x: %v", msg, err)
		return
	}
	c.net.mu.Lock()
	q := &fakeQuery{Msg: m, wire: bytes.Clone(msg), conn: c, at: time.Now(), nth: c.nth}
	c.nth++
	c.net.seen = append(c.net.seen, q)
	script := c.net.servers[c.server]
	c.net.mu.Unlock()
	c.net.scripts.Lock() // scripts need no locks of their own
	defer c.net.scripts.Unlock()
	script(q)
}

func (c *fakeConn) Close() error {
	c.once.Do(func() {
		c.err = net.ErrClosed
		close(c.gone)
	})
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.closed {
		return errors.New("closed twice")
	}
	c.closed = true
	c.net.open--
	return nil
}

func (c *fakeConn) LocalAddr() net.Addr {
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 100}), uint16(20000+c.number))
	if c.network == "tcp" {
		return net.TCPAddrFromAddrPort(addr)
	}
	return net.UDPAddrFromAddrPort(addr)
}

func (c *fakeConn) RemoteAddr() net.Addr             { return net.UDPAddrFromAddrPort(c.server) }
func (c *fakeConn) SetDeadline(time.Time) error      { return nil }
func (c *fakeConn) SetReadDeadline(time.Time) error  { return nil }
func (c *fakeConn) SetWriteDeadline(time.Time) error { return nil }

var _ io.ReadWriteCloser = (*fakeConn)(nil)

// query returns a question for the A records of a name.
func query(name string) Question {
	key, err := zoneKey(name)
	if err != nil {
		panic(err)
	}
	return Question{Name: []byte(key), Type: dns.TypeA, Class: dns.ClassINET}
}

// usual is the budget of the default configuration.
var usual = Budget{Hedge: 5, Retry: 10}
