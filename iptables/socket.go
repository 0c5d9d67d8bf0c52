package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// Sockets are the sockets of one address.
type Sockets struct {
	Addr netip.AddrPort
	UDP  []*net.UDPConn
	TCP  []*net.TCPListener
	// first is how many sockets of others were in the kernel's group of each
	// protocol before ours.
	first map[Proto]int
}

// ListenConfig says how Listen opens its sockets.
type ListenConfig struct {
	UDP, TCP int // how many of each, at least one
	// Net says how they are opened otherwise: the options of all sockets of
	// who serves them, set by its Control before ours. Multipath TCP is
	// turned off in any case: the kernel cannot steer it.
	Net net.ListenConfig
}

// listenTries bounds how often Listen starts anew because others opened or
// closed sockets of the same address meanwhile.
const listenTries = 10

// Listen opens transparent sockets (IP_TRANSPARENT, Linux 2.6.28;
// IPV6_TRANSPARENT, 2.6.37) on an address that no interface has. They share
// address and port with those of a predecessor of the same user (SO_REUSEPORT,
// Linux 3.9). It needs NET_ADMIN, and NET_BIND_SERVICE below port 1024.
//
// From now on the kernel hands a share of what arrives to them, so they must
// be read at once; Steer makes it all.
func Listen(ctx context.Context, addr netip.AddrPort, cfg ListenConfig) (*Sockets, error) {
	for range listenTries {
		s := &Sockets{Addr: addr, first: make(map[Proto]int)}
		again, err := s.open(ctx, cfg)
		if err == nil && !again {
			return s, nil
		}
		if err = errors.Join(err, s.Close()); err != nil {
			return nil, fmt.Errorf("listen on %v: %w", addr, err)
		}
	}
	return nil, fmt.Errorf("listen on %v: other sockets there come and go", addr)
}

// Served reports whether somebody has sockets on the address, UDP or TCP: those
// of a predecessor, from which Listen and Steer would take its queries.
func Served(addr netip.AddrPort) (bool, error) {
	for _, p := range protos() {
		if n, err := countGroup(p, addr); n > 0 || err != nil {
			return n > 0, err
		}
	}
	return false, nil
}

// open opens the sockets; again is true if others changed the group meanwhile.
func (s *Sockets) open(ctx context.Context, cfg ListenConfig) (again bool, err error) {
	lc := cfg.Net
	lc.Control = cfg.control
	lc.SetMultipathTCP(false)
	suffix := [2]string{"4", "6"}[family(s.Addr.Addr())]
	for _, p := range protos() {
		if s.first[p], err = countGroup(p, s.Addr); err != nil {
			return false, err
		}
	}
	for range max(1, cfg.UDP) {
		c, err := lc.ListenPacket(ctx, "udp"+suffix, s.Addr.String())
		if err != nil {
			return false, explainListen(err)
		}
		s.UDP = append(s.UDP, c.(*net.UDPConn))
	}
	for range max(1, cfg.TCP) {
		l, err := lc.Listen(ctx, "tcp"+suffix, s.Addr.String())
		if err != nil {
			return false, explainListen(err)
		}
		s.TCP = append(s.TCP, l.(*net.TCPListener))
	}
	for p, ours := range map[Proto]int{UDP: len(s.UDP), TCP: len(s.TCP)} {
		n, err := countGroup(p, s.Addr)
		if err != nil {
			return false, err
		}
		again = again || n != s.first[p]+ours
	}
	return again, nil
}

// explainListen adds the remedy to what operators meet.
func explainListen(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return &ConfigError{
			Key: "intercept.mode", Problem: "a transparent socket may not be opened", Err: err,
			Remedy: "give the container the capabilities NET_ADMIN and NET_BIND_SERVICE, or set intercept.mode to none",
		}
	case errors.Is(err, unix.EADDRINUSE):
		return &ConfigError{
			Key: "listen", Problem: "another process serves the address", Err: err,
			Remedy: "stop it (ss -lnutp shows it); an older dnsguard must run as the same user",
		}
	}
	return err
}

func (c *ListenConfig) control(network, address string, raw syscall.RawConn) error {
	if c.Net.Control != nil {
		if err := c.Net.Control(network, address, raw); err != nil {
			return err
		}
	}
	var err error
	cerr := raw.Control(func(fd uintptr) { err = setTransparent(int(fd), network) })
	return errors.Join(cerr, err)
}

// setTransparent sets what interception needs of a socket.
func setTransparent(fd int, network string) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if network[len(network)-1] == '6' {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return fmt.Errorf("make socket transparent: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return fmt.Errorf("set SO_REUSEPORT: %w", err)
	}
	return nil
}

// Close closes what is still open. What waits in the queues is lost.
func (s *Sockets) Close() error {
	var errs []error
	for _, c := range s.UDP {
		errs = append(errs, c.Close())
	}
	for _, l := range s.TCP {
		errs = append(errs, l.Close())
	}
	for i, err := range errs {
		if errors.Is(err, net.ErrClosed) {
			errs[i] = nil
		}
	}
	return errors.Join(errs...)
}

// MarkUpstream returns a control function for net.Dialer that marks sockets as
// our own to upstream: their packets to an address that we intercept are not
// taken but go to kube-proxy. mark is Config.Mark. It needs NET_ADMIN.
func MarkUpstream(mark uint32) func(network, address string, c syscall.RawConn) error {
	c := Config{Mark: mark}.withDefaults()
	return markSocket(c.own())
}

// markSocket returns a control function that gives all packets of a socket a
// mark (SO_MARK, Linux 2.6.25).
func markSocket(mark uint32) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) })
		if err = errors.Join(cerr, err); err != nil {
			return fmt.Errorf("mark socket with %#x (%d bits): %w", mark, bits.OnesCount32(mark), err)
		}
		return nil
	}
}
