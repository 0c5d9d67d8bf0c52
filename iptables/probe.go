package iptables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// probeTable is the name of a table that is never committed.
const probeTable = "dnsguard-probe"

// probeNFT asks the kernel whether it would take the rule set, first with a
// table that belongs to the socket, then with an ordinary one. Nothing is
// applied.
func probeNFT(rs RuleSet) support {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return support{err: nftSupport(err)}
	}
	defer func() { _ = c.Close() }()
	if err = tryNFT(c, rs, true); err == nil {
		return support{owner: true, reason: "nftables; the kernel removes the rules when the process ends"}
	}
	if errors.Is(err, fs.ErrPermission) {
		return support{err: err}
	}
	if e := tryNFT(c, rs, false); e != nil {
		return support{err: nftSupport(e)}
	}
	return support{reason: "nftables; before Linux 5.12, so the rules stay, without effect, when the process ends"}
}

func tryNFT(c *netlink.Conn, rs RuleSet, owner bool) error {
	process := rs.process(owner)
	process.name = probeTable
	var b batch
	b.assert(&process)
	if t, ok := rs.fallback(); ok {
		t.name = probeTable + "-fallback"
		b.assert(&t)
	}
	return b.try(c)
}

// nftSupport tells a refusal for good from one that may pass. A kernel that
// lacks a part says ENOENT (no such expression, chain type or table family),
// EOPNOTSUPP, or EINVAL (an attribute or flag that it does not know); one
// without nf_tables at all refuses the subsystem or the socket.
func nftSupport(err error) error {
	for _, lacking := range []error{
		unix.ENOENT, unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT,
	} {
		if errors.Is(err, lacking) {
			return fmt.Errorf("%w: %w", ErrNotSupported, err)
		}
	}
	return err
}

// prober asks the services themselves, over the way that packets take which
// were taken: marked, by our routing rule and routes, over the loopback
// device to the socket, and back through the rule that renews @alive. Neither
// kernel takes a probe's packets by @alive, so they also revive what has died.
type prober struct {
	query []byte
	mark  uint32
}

// ask returns when the service has answered.
func (p prober) ask(ctx context.Context, s Service) error {
	d := net.Dialer{Control: markSocket(p.mark)}
	// The kernel would choose the service's own address as source, to which
	// replies would not come back: they are not marked.
	local, err := sourceFor(ctx, s.Addr)
	if err != nil {
		return fmt.Errorf("probe %v: %w", s, err)
	}
	switch s.Proto {
	case UDP:
		d.LocalAddr = &net.UDPAddr{IP: local.AsSlice()}
	default:
		d.LocalAddr = &net.TCPAddr{IP: local.AsSlice()}
	}
	c, err := d.DialContext(ctx, s.Proto.String(), s.Addr.String())
	if err != nil {
		return fmt.Errorf("probe %v: %w", s, err)
	}
	defer func() { _ = c.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return fmt.Errorf("probe %v: %w", s, err)
		}
	}
	if err := p.exchange(c); err != nil {
		return fmt.Errorf("probe %v: %w", s, err)
	}
	return nil
}

func (p prober) exchange(c net.Conn) error {
	tcp, stream := c.(*net.TCPConn)
	if !stream {
		if _, err := c.Write(p.query); err != nil {
			return err
		}
		buf := make([]byte, 512) // RFC 1035 section 2.3.4; what does not fit is cut off
		for {
			n, err := c.Read(buf)
			if err != nil || n >= 2 && bytes.Equal(buf[:2], p.query[:2]) {
				return err
			}
		}
	}
	// End with a reset: four probes a second would fill the node with
	// connections in TIME_WAIT.
	if err := tcp.SetLinger(0); err != nil {
		return err
	}
	length := binary.BigEndian.AppendUint16(nil, uint16(len(p.query)))
	if _, err := c.Write(slices.Concat(length, p.query)); err != nil { // RFC 1035 section 4.2.2
		return err
	}
	var head [4]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return err
	}
	if !bytes.Equal(head[2:], p.query[:2]) {
		return errors.New("the answer has another id")
	}
	return nil
}

// sourceFor returns the address that a client on the node would have. Where
// the node has no route to the service (it may have none for IPv6) that is the
// loopback address, from which nobody but us then asks.
func sourceFor(ctx context.Context, to netip.AddrPort) (netip.Addr, error) {
	c, err := new(net.Dialer).DialContext(ctx, "udp", to.String()) // sends nothing
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return [2]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}[family(to.Addr())], nil
	}
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = c.Close() }()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr(), nil
}
