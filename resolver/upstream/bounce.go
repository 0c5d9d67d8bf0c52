package upstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// An ICMP error fails the next call on a connected socket, whoever makes it. Whose
// question it is about is told by the datagram that it quotes (RFC 792; RFC 4443
// section 3), which the kernel keeps where it is asked to: IP_RECVERR, ip(7). So one
// question fails and no other, and an error that quotes none of ours, as somebody
// who guesses ports would send, fails nothing (RFC 5927 section 4).

// bounce is an ICMP error with what it quotes of our datagram. A socket that is not
// the kernel's may have its Read fail by one.
type bounce struct {
	err    error
	quoted []byte
}

func (b *bounce) Error() string { return b.err.Error() }
func (b *bounce) Unwrap() error { return b.err }

const (
	// quotedLen is as much of a datagram as is kept: the longest question, and OPT.
	quotedLen = 512
	// maxBounces are read at a time.
	maxBounces = 256
	// maxRebuffs questions refused in the order of their sending, the oldest first
	// and without an answer between, are what it looks like where nobody listens.
	// One may be a rule that rejects some packets; and no more than six are told of
	// at once (kernel, net/ipv4/icmp.c, XRLIM_BURST_FACTOR).
	maxRebuffs = 2
	// maxSends is how often a datagram is given to the kernel that refuses it since
	// errors about others have come meanwhile.
	maxSends = 4
	// maxBlank errors in a row without one in the queue are none of ICMP's.
	maxBlank = 4
)

// wantQuotes has the kernel keep the datagrams that ICMP errors quote. It reports
// whether it does.
func wantQuotes(raw syscall.RawConn) (does bool) {
	_ = raw.Control(func(fd uintptr) {
		does = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVERR, 1) == nil ||
			unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_RECVERR, 1) == nil
	})
	return does
}

// fromICMP reports whether it may be an ICMP error that the kernel tells by this
// one: icmp_err_convert in net/ipv4/icmp.c, tab_unreach in net/ipv6/icmp.c.
func fromICMP(err error) bool {
	for _, e := range []error{
		unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.ENOPROTOOPT,
		unix.EMSGSIZE, unix.EOPNOTSUPP, unix.EHOSTDOWN, unix.ENONET, unix.EPROTO,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// readBounces takes the ICMP errors off a socket.
func readBounces(fd uintptr) (all []bounce) {
	var oob [128]byte
	for range maxBounces {
		msg := make([]byte, quotedLen)
		n, oobn, _, _, err := unix.Recvmsg(int(fd), msg, oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			break
		}
		all = append(all, bounce{icmpError(oob[:oobn]), msg[:n]})
	}
	return all
}

// icmpError returns what the kernel makes of an ICMP error: the first field of
// struct sock_extended_err.
func icmpError(oob []byte) error {
	control, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return unix.ECONNREFUSED
	}
	for _, m := range control {
		v4 := m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_RECVERR
		v6 := m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_RECVERR
		if (v4 || v6) && len(m.Data) >= 4 {
			return syscall.Errno(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return unix.ECONNREFUSED
}

// aboutOthers takes in the ICMP errors that have come, where a send failed. It
// reports whether it failed for those: then nothing was sent yet.
func (c *conn) aboutOthers(err error) bool {
	if !c.quotes || !fromICMP(err) {
		return false
	}
	var all []bounce
	if c.raw.Control(func(fd uintptr) { all = readBounces(fd) }) != nil {
		return false
	}
	for i := range all {
		if _, err := c.bounced(&all[i]); err != nil {
			c.close(err)
			return false
		}
	}
	return true
}

// bounced takes in an ICMP error: the question that it quotes has failed. It reports
// whether the socket has more to wait for; dead is why it is of no more use.
//
// Where others have been answered since the question was sent, or wait for longer,
// somebody listens there, and the error is about the one datagram. Else the socket
// gets none that another can take until it has an answer; after maxRebuffs in a row
// it leads nowhere: then those under way are asked again as after any such error.
func (c *conn) bounced(b *bounce) (more bool, dead error) {
	if len(b.quoted) < dnswire.HeaderLen { // routers need not quote more than 8 octets
		if c.survives() {
			return true, nil
		}
		return false, b.err
	}
	s := c.srv
	s.mu.Lock()
	defer s.unlock()
	id := dnswire.ID(b.quoted)
	e, ok := c.entries[id]
	if !ok || e.x != nil && !e.x.quotedIn(b.quoted) {
		return !c.done() && !c.closed, nil
	}
	delete(c.entries, id)
	p := &s.paths[c.tr]
	p.failures[Network]++
	if c.heard < e.sent && !c.hasOlder(e) {
		c.rebuffed = s.f.now()
		c.rebuffs++
	}
	if e.x != nil {
		c.live--
		a := e.x.at(int(e.i))
		a.err, a.met = b.err, c.heard != never
		if p.heard < e.sent && !a.extra() {
			s.strike(e.x, c.tr, false)
		}
		e.x.events <- event{attempt: e.i, what: failed}
	}
	switch {
	case c.rebuffs == 0:
	case c.heard == never && c.rebuffs >= maxRebuffs:
		return false, b.err
	case c.heard == never:
		c.retire()
	case c.rebuffs >= maxRebuffs:
		c.retire()
		c.tellAll(socketRefused)
	}
	return !c.done(), nil
}

// hasOlder reports whether an answer is due to a question that was sent before; the
// caller holds srv.mu.
func (c *conn) hasOlder(than entry) bool {
	for _, e := range c.entries {
		if e.nth < than.nth {
			return true
		}
	}
	return false
}

// quotedIn reports whether a datagram is the exchange's, as far as it is there.
func (x *exchange) quotedIn(msg []byte) bool {
	n := min(len(msg), x.end)
	return bytes.Equal(msg[dnswire.HeaderLen:n], x.query[dnswire.HeaderLen:n])
}
