package upstream

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// ErrNoServers tells that a route has no server to ask, such as a resolv.conf
// without a usable nameserver line. New wraps it with the file's path.
var ErrNoServers = errors.New("no nameservers")

var (
	errSelf      = errors.New("an address of our own: forwarding to it would loop")
	errClosed    = errors.New("forwarder closed")
	errSockets   = errors.New("too many open sockets to the server")
	errMovedOn   = errors.New("socket at the end of its life")
	errTruncated = errors.New("truncated, and not to be had whole")
)

// IsLocal reports whether a socket was not to be had for want of something on
// this machine. What says that there is no way to the server (ENETUNREACH,
// EADDRNOTAVAIL without an address of its family, EACCES by a prohibiting route)
// is not among it: another server may do.
func IsLocal(err error) bool {
	for _, local := range []error{
		unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS,
		unix.EAGAIN, // no free port, connect(2)
		errSockets,
	} {
		if errors.Is(err, local) {
			return true
		}
	}
	return false
}

// isDead reports whether a send failed since the socket is of no more use: an
// ICMP error has told that nobody listens, or it is closed. All else that the
// kernel says (EPERM: a rule dropped the packet on its way out; ENOBUFS, EAGAIN:
// no room; ENETUNREACH, EHOSTUNREACH, ENETDOWN, EINVAL: no route or device at
// the moment) is about one datagram, which is lost like any other.
func isDead(err error) bool {
	for _, dead := range []error{
		unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE, unix.ENOTCONN, unix.EDESTADDRREQ,
		unix.EBADF, unix.ENOTSOCK, net.ErrClosed, os.ErrClosed, io.ErrClosedPipe,
	} {
		if errors.Is(err, dead) {
			return true
		}
	}
	return false
}

// Reason says why there is no answer.
type Reason uint8

// The reasons. Rcode is never in an Error: Exchange returns such an answer as
// it is; it counts the server's failures in PathStats.
const (
	// Timeout: nobody answered in time.
	Timeout Reason = iota
	// Network: the question could not be delivered (ICMP unreachable, a
	// failed dial, a closed connection).
	Network
	// OverBudget: the server that was asked did not answer in time, and the
	// budget did not allow to ask again.
	OverBudget
	// NoServers: no route or no server for the name.
	NoServers
	// Malformed: nobody answered in time but with messages that are no DNS
	// answers, under the right id and question.
	Malformed
	// Truncated: the answer does not fit UDP, and TCP is not allowed or does
	// not work.
	Truncated
	// Canceled: the caller's context ended first.
	Canceled
	// Closed: the Forwarder was closed.
	Closed
	// Local: this machine could not send the question: no descriptor, no
	// memory, no port, or a rule of its own firewall. It says nothing about
	// the server.
	Local
	// Rcode: the server answered with an error (SERVFAIL, REFUSED, ...) or
	// with a referral.
	Rcode

	numReasons
)

// String returns the reason in the form of a metric's label.
func (r Reason) String() string {
	return [numReasons]string{
		"timeout", "network", "over_budget", "no_servers", "malformed", "truncated", "canceled", "closed", "local", "rcode",
	}[r]
}

// Error tells why a question was not answered. Exchange returns no other error.
type Error struct {
	Reason Reason
	Server netip.AddrPort // the last that was asked; invalid if none was
	Err    error          // may be nil
}

// Error returns the server, the reason and the cause.
func (e *Error) Error() string {
	s := e.text()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// text returns who did not answer, and why.
func (e *Error) text() string {
	reason := strings.ReplaceAll(e.Reason.String(), "_", " ")
	if e.Reason == Local {
		reason = "not sent, trouble on this node"
	}
	if !e.Server.IsValid() {
		return "upstream: " + reason
	}
	return "upstream " + e.Server.String() + ": " + reason
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// EDE returns the extended DNS error that tells a client of this (RFC 8914
// section 4).
func (e *Error) EDE() (code uint16, text string) {
	text = e.text()
	switch e.Reason {
	case Timeout, OverBudget, NoServers:
		return dnswire.EDENoReachable, text
	case Malformed, Truncated:
		return dnswire.EDEInvalidData, text
	case Closed, Local:
		return dnswire.EDENotReady, text
	case Canceled:
		return dnswire.EDEOther, text
	default:
		return dnswire.EDENetworkError, text
	}
}
