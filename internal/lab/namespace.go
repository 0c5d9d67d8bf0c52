package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

var (
	// ErrClosed reports a use of a Namespace after its Close.
	ErrClosed = errors.New("namespace is closed")
	// errGoexit reports that the function given to Do ended its goroutine
	// (runtime.Goexit, which testing's FailNow uses) instead of returning.
	errGoexit = errors.New("function ended its goroutine instead of returning")
)

// Namespace is an anonymous network namespace: it has no name in /run/netns
// and lives only as long as this process holds its file descriptor, a socket
// or a process in it. However this process ends, the kernel reclaims it.
//
// Methods are safe for concurrent use.
type Namespace struct {
	label string // for error messages only

	mu        sync.Mutex
	handle    netns.NsHandle // -1 once closed
	processes map[*Process]struct{}
}

// NewNamespace makes a namespace with its loopback device up, IPv6 enabled
// where the kernel has it, duplicate address detection and reverse-path
// filtering off. label names it in errors.
func NewNamespace(label string) (*Namespace, error) {
	n := &Namespace{label: label, handle: -1, processes: make(map[*Process]struct{})}
	var err error
	onThread(func() bool {
		home, e := netns.Get()
		if e != nil {
			err = fmt.Errorf("open the thread's network namespace: %w", e)
			return true
		}
		defer func() { _ = home.Close() }()
		if n.handle, err = netns.New(); err != nil {
			err = fmt.Errorf("make network namespace %s: %w", label, err)
		} else if err = prepare(); err != nil {
			err = fmt.Errorf("prepare network namespace %s: %w", label, err)
		}
		return netns.Set(home) == nil
	})
	if err != nil {
		if n.handle.IsOpen() {
			_ = n.handle.Close()
		}
		return nil, err
	}
	return n, nil
}

// prepare readies the calling thread's new namespace.
func prepare() error {
	settings := [][2]string{
		// A new namespace inherits the IPv4 settings of the machine
		// (devconf_inherit_init_net 0), whatever they are: the laboratory
		// must not depend on them.
		{"net.ipv4.conf.all.rp_filter", "0"},
		{"net.ipv4.conf.default.rp_filter", "0"},
		{"net.ipv4.conf.all.forwarding", "0"},
		// Whether a refused client hears of it must not depend on how many
		// were refused before.
		{"net.ipv4.icmp_ratelimit", "0"},
	}
	if hasIPv6() {
		settings = append(settings,
			[2]string{"net.ipv6.conf.all.disable_ipv6", "0"},
			[2]string{"net.ipv6.conf.default.disable_ipv6", "0"},
			// Duplicate address detection keeps an address unusable for a
			// second; nobody else is on these links.
			[2]string{"net.ipv6.conf.all.accept_dad", "0"},
			[2]string{"net.ipv6.conf.default.accept_dad", "0"},
			[2]string{"net.ipv6.conf.default.accept_ra", "0"},
			[2]string{"net.ipv6.conf.default.router_solicitations", "0"},
			[2]string{"net.ipv6.icmp.ratelimit", "0"},
		)
	}
	for _, s := range settings {
		if err := writeSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback device: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring the loopback device up: %w", err)
	}
	return nil
}

// hasIPv6 reports whether the kernel was started with IPv6.
func hasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}

// Do runs f on a thread of its own inside the namespace and returns f's error.
// What f creates belongs to the namespace for good: a socket made here may be
// used from any goroutine afterwards. f must not start goroutines that rely on
// the namespace, nor end its own (testing's FailNow): that is an error here.
func (n *Namespace) Do(f func() error) error {
	err := fmt.Errorf("in namespace %s: %w", n.label, errGoexit)
	onThread(func() bool {
		home, e := netns.Get()
		if e != nil {
			err = fmt.Errorf("open the thread's network namespace: %w", e)
			return true
		}
		defer func() { _ = home.Close() }()
		if e = n.enter(); e != nil {
			err = e
			return true
		}
		err = f()
		return netns.Set(home) == nil
	})
	return err
}

// enter moves the calling thread into the namespace.
func (n *Namespace) enter() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.handle.IsOpen() {
		return fmt.Errorf("enter namespace %s: %w", n.label, ErrClosed)
	}
	if err := netns.Set(n.handle); err != nil {
		return fmt.Errorf("enter namespace %s: %w", n.label, err)
	}
	return nil
}

// ListenPacket is net.ListenPacket inside the namespace. address must be
// literal: names are not resolved.
func (n *Namespace) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	var c net.PacketConn
	err := n.literal(address, func() (err error) {
		c, err = new(net.ListenConfig).ListenPacket(ctx, network, address)
		return err
	})
	return c, err
}

// Listen is net.Listen inside the namespace. address must be literal.
func (n *Namespace) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var l net.Listener
	err := n.literal(address, func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// Dial is net.Dialer.DialContext inside the namespace. address must be literal.
func (n *Namespace) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var c net.Conn
	err := n.literal(address, func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// literal runs f inside the namespace if address is an IP address and port.
// Package net would resolve a name in goroutines of its own, and they would
// run in the machine's namespace.
func (n *Namespace) literal(address string, f func() error) error {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return fmt.Errorf("address in namespace %s: %w", n.label, err)
	}
	return n.Do(f)
}

// Sysctl sets a kernel parameter below net. for this namespace, for example
// net.netfilter.nf_conntrack_udp_timeout. Parts may be divided by dots or
// slashes (interface names hold dots).
func (n *Namespace) Sysctl(key, value string) error {
	return n.Do(func() error { return writeSysctl(key, value) })
}

// writeSysctl sets a parameter in the calling thread's namespace. /proc/sys/net
// shows the namespace of the thread that opens it. Everything outside net. is
// the whole machine's and therefore refused.
func writeSysctl(key, value string) error {
	name := key
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	if name = path.Clean(name); !strings.HasPrefix(name, "net/") {
		return fmt.Errorf("set %s: only parameters below net. belong to a network namespace", key)
	}
	if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s to %s: %w", key, value, err)
	}
	return nil
}

// String returns the label.
func (n *Namespace) String() string { return n.label }

// fd returns the namespace's file descriptor, valid until Close.
func (n *Namespace) fd() (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.handle.IsOpen() {
		return -1, fmt.Errorf("namespace %s: %w", n.label, ErrClosed)
	}
	return int(n.handle), nil
}

// Close kills the namespace's processes, waits for them and gives the
// namespace up. The kernel removes it, with its links, when the last socket in
// it is closed too; those are their owners' to close. Closing twice is no error.
func (n *Namespace) Close() error {
	n.mu.Lock()
	processes := make([]*Process, 0, len(n.processes))
	for p := range n.processes {
		processes = append(processes, p)
	}
	var err error
	if n.handle.IsOpen() {
		err = n.handle.Close()
	}
	n.mu.Unlock()
	for _, p := range processes {
		p.kill()
		<-p.Done()
	}
	return err
}
