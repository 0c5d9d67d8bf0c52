package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Endpoint is an address that is served, with its sockets: each UDP socket
// gets a reader of its own, each TCP listener an acceptor. Listen makes one of
// plain sockets; callers with other needs fill it themselves.
type Endpoint struct {
	Addr netip.AddrPort
	UDP  []*net.UDPConn
	TCP  []*net.TCPListener
}

// ListenOptions say how Listen opens its sockets.
type ListenOptions struct {
	// Readers is the number of UDP sockets, at least 1. The kernel spreads
	// clients over them by address and port (SO_REUSEPORT, Linux 3.9).
	Readers int
	// ReceiveBuffer is the receive buffer of each UDP socket in octets of
	// kernel memory, 0 for the system's default. It is set beyond
	// net.core.rmem_max where the process may (CAP_NET_ADMIN).
	ReceiveBuffer int
	// Share lets the sockets join others of the same user on the same
	// address, for an upgrade without a gap. Without it, Listen refuses an
	// address that somebody holds.
	Share bool
	// Control, if not nil, is called on each socket before it is bound.
	Control func(network, address string, c syscall.RawConn) error
}

// NetConfig returns how package net opens a socket with these options. Who
// opens sockets for Serve otherwise than with Listen takes it as well, so that
// all that are served are alike.
func (o ListenOptions) NetConfig() net.ListenConfig {
	lc := net.ListenConfig{KeepAlive: -1, Control: o.control}
	// By default package net listens with Multipath TCP (Go 1.24). Nobody asks
	// DNS that way, and the kernel cannot steer such sockets: SO_REUSEPORT's
	// programs are for plain TCP (net/mptcp/sockopt.c).
	lc.SetMultipathTCP(false)
	return lc
}

// Listen opens UDP and TCP sockets on addr. Its errors say what an operator
// has to do about them.
//
// With port 0 the kernel chooses a port for UDP; if TCP cannot have the same, it
// chooses anew.
func Listen(ctx context.Context, addr netip.AddrPort, o ListenOptions) (*Endpoint, error) {
	ep, err := listen(ctx, addr, o)
	for try := 1; try < 10 && addr.Port() == 0 && errors.Is(err, unix.EADDRINUSE); try++ {
		ep, err = listen(ctx, addr, o)
	}
	return ep, err
}

func listen(ctx context.Context, addr netip.AddrPort, o ListenOptions) (*Endpoint, error) {
	if !o.Share {
		if err := probe(ctx, addr, o.Control); err != nil {
			return nil, err
		}
	}
	lc := o.NetConfig()
	ep := &Endpoint{Addr: addr}
	for range max(1, o.Readers) {
		pc, err := lc.ListenPacket(ctx, "udp"+family(addr.Addr()), addr.String())
		if err != nil {
			return nil, errors.Join(explain("udp", addr, err), ep.Close())
		}
		ep.UDP = append(ep.UDP, pc.(*net.UDPConn))
		if addr.Port() == 0 { // the others, and TCP, share the port that the kernel chose
			addr = netip.AddrPortFrom(addr.Addr(), pc.LocalAddr().(*net.UDPAddr).AddrPort().Port())
			ep.Addr = addr
		}
	}
	l, err := lc.Listen(ctx, "tcp"+family(addr.Addr()), addr.String())
	if err != nil {
		return nil, errors.Join(explain("tcp", addr, err), ep.Close())
	}
	ep.TCP = append(ep.TCP, l.(*net.TCPListener))
	return ep, nil
}

// Close closes the sockets of an endpoint that is not served.
func (ep *Endpoint) Close() error {
	var errs []error
	for _, c := range ep.UDP {
		errs = append(errs, c.Close())
	}
	for _, l := range ep.TCP {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// family returns the suffix that pins a network of package net to a family:
// [::] takes IPv4 as well only where no 0.0.0.0 was asked for, which package
// net leaves to the system's default; we never want that.
func family(a netip.Addr) string {
	if a.Unmap().Is4() {
		return "4"
	}
	return "6"
}

// probe binds the address once without SO_REUSEPORT, which fails if anybody
// holds it: with SO_REUSEPORT two servers of one user would silently share the
// queries.
func probe(ctx context.Context, addr netip.AddrPort, control func(string, string, syscall.RawConn) error) error {
	lc := net.ListenConfig{Control: control}
	pc, err := lc.ListenPacket(ctx, "udp"+family(addr.Addr()), addr.String())
	if err != nil {
		return explain("udp", addr, err)
	}
	return pc.Close()
}

// explain adds the remedy to the errors that operators meet.
func explain(network string, addr netip.AddrPort, err error) error {
	remedy := ""
	switch {
	case errors.Is(err, unix.EADDRNOTAVAIL):
		remedy = ": the address is on no interface of this machine; add it to one, or let dnsguard intercept it (intercept.mode)"
	case errors.Is(err, unix.EADDRINUSE):
		remedy = ": another process serves this address and port; stop it or choose another in listen (ss -lnutp shows it)"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		remedy = ": ports below 1024 need the capability NET_BIND_SERVICE"
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return fmt.Errorf("listen on %s %s: %w%s", network, addr, errno, remedy)
	}
	return fmt.Errorf("listen on %s %s: %w%s", network, addr, err, remedy)
}

// control sets the options of a socket before it is bound.
func (o *ListenOptions) control(network, address string, c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) { err = o.setOptions(int(fd), network, address) })
	if err = errors.Join(cerr, err); err != nil {
		return err
	}
	if o.Control != nil {
		return o.Control(network, address, c)
	}
	return nil
}

func (o *ListenOptions) setOptions(fd int, network, address string) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return fmt.Errorf("set SO_REUSEPORT: %w", err)
	}
	if network[:3] != "udp" {
		return limitConns(fd)
	}
	if o.ReceiveBuffer > 0 {
		// The kernel doubles the value for its own overhead (socket(7)).
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, o.ReceiveBuffer/2) != nil {
			// Without the capability, rmem_max caps it: fewer
			// datagrams of a burst survive, nothing else.
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, o.ReceiveBuffer/2)
		}
	}
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("parse %q: %w", address, err)
	}
	// Answers are at most 1,232 octets. OMIT: never believe ICMP about the
	// path's MTU (anyone can forge it), fragment only where the interface
	// itself is smaller (ip(7), Linux 3.15).
	level, pmtu, omit, info := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT, unix.IP_PKTINFO
	if ap.Addr().Is6() {
		level, pmtu, omit, info = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_OMIT, unix.IPV6_RECVPKTINFO
	}
	if err := unix.SetsockoptInt(fd, level, pmtu, omit); err != nil {
		return fmt.Errorf("set IP_MTU_DISCOVER: %w", err)
	}
	if ap.Addr().IsUnspecified() {
		// A reply must leave from the address that was asked.
		if err := unix.SetsockoptInt(fd, level, info, 1); err != nil {
			return fmt.Errorf("set IP_PKTINFO: %w", err)
		}
	}
	return nil
}

// What the kernel keeps for a TCP connection, in octets of its memory. By itself
// it would give a client that reads or asks fast up to 4 and 6 MiB
// (net.ipv4.tcp_wmem, tcp_rmem), which count against the memory limit of the
// process, and keep them when the client then stops: a thousand connections that
// take nothing would have it killed. 8 KiB hold a window of a hundred queries, 16 KiB
// a dozen full answers; what is larger goes in pieces.
const (
	connReceiveBuffer = 8 << 10
	connSendBuffer    = 16 << 10
)

// connPatience is how long the kernel waits for a client that acknowledges
// nothing, or takes nothing, also after the connection has been closed here: it
// keeps what was written for minutes otherwise, and nobody counts it.
const connPatience = 5 * time.Second

// limitConns bounds what the kernel keeps for the connections of a listener, which
// inherit it.
func limitConns(fd int) error {
	// The kernel doubles the values for its own overhead (socket(7)).
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, connReceiveBuffer/2); err != nil {
		return fmt.Errorf("set SO_RCVBUF: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, connSendBuffer/2); err != nil {
		return fmt.Errorf("set SO_SNDBUF: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(connPatience.Milliseconds())); err != nil {
		return fmt.Errorf("set TCP_USER_TIMEOUT: %w", err)
	}
	return nil
}

// leaveGroup takes a bound UDP socket out of the kernel's choice for new
// datagrams: a connected socket gets those of its peer only (Linux 5.4 for
// SO_REUSEPORT groups), and nothing sends from port 1 of the loopback address.
// That can be reached from any address, also from one that no interface has and
// to which no route leads; only from an address of a link (fe80::/10) it cannot,
// whose peer is itself.
// What is queued already stays readable, and answers can still be sent, since
// they name their destination.
func leaveGroup(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		var local, peer unix.Sockaddr
		if local, err = unix.Getsockname(int(fd)); err != nil {
			return
		}
		switch own := local.(type) {
		case *unix.SockaddrInet4:
			peer = &unix.SockaddrInet4{Port: 1, Addr: [4]byte{127, 0, 0, 1}}
		case *unix.SockaddrInet6:
			peer = &unix.SockaddrInet6{Port: 1, Addr: netip.IPv6Loopback().As16()}
			if own.ZoneId != 0 {
				peer = &unix.SockaddrInet6{Port: 1, Addr: own.Addr, ZoneId: own.ZoneId}
			}
		}
		err = unix.Connect(int(fd), peer)
	})
	return errors.Join(cerr, err)
}

func zoneIndex(zone string) uint32 {
	if i, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(i)
	}
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return uint32(ifi.Index) //nolint:gosec // an interface index
	}
	return 0
}

// zoneName names a scope by its number: looking its name up costs a dump of
// all links, and package net takes numbers.
func zoneName(index uint32) string { return strconv.FormatUint(uint64(index), 10) }

// socketDrops returns how many datagrams the kernel dropped at the socket
// because its receive buffer was full (SK_MEMINFO_DROPS, Linux 4.12).
func socketDrops(c *net.UDPConn) uint64 {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	var drops uint64
	_ = raw.Control(func(fd uintptr) {
		drops = uint64(memInfo(fd)[unix.SK_MEMINFO_DROPS])
	})
	return drops
}
