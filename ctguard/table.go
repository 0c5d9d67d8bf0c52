package ctguard

import (
	"context"
	"errors"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Errors of a [Table] and [Events] on which callers act. Test with errors.Is.
var (
	// ErrInterrupted: the dump missed or repeated entries. Start it again.
	ErrInterrupted = errors.New("conntrack dump interrupted")

	// ErrNotSupported: this kernel cannot do it, now or later.
	ErrNotSupported = errors.New("not supported by this kernel")

	// ErrEventsLost: the kernel had more events than room for them. The
	// subscription goes on, but the table has to be read.
	ErrEventsLost = errors.New("conntrack events lost")
)

// Match selects UDP flows.
type Match struct {
	// Dst is the original destination. An unspecified address (0.0.0.0 or ::)
	// stands for any address of its family.
	Dst netip.AddrPort

	// Src is the reply source, or the zero value for any.
	Src netip.AddrPort
}

// Matches tells whether f is selected.
func (m Match) Matches(f Flow) bool {
	d := f.Orig.Dst
	return f.Proto == unix.IPPROTO_UDP && d.Port() == m.Dst.Port() &&
		(d.Addr() == m.Dst.Addr() || m.anyAddr() && d.Addr().Is4() == m.Dst.Addr().Is4()) &&
		(!m.Src.IsValid() || f.Reply.Src == m.Src)
}

func (m Match) anyAddr() bool { return m.Dst.Addr().IsUnspecified() }

// Table is the connection tracking table of one network namespace. [Kernel]
// is the real one; package ctguardtest has one for tests.
type Table interface {
	// Flows reads the flows that at least one of the matches selects, of all
	// zones, in no order. It yields an error last, if any; after
	// ErrInterrupted what it has yielded is worthless.
	Flows(ctx context.Context, matches []Match) iter.Seq2[Flow, error]

	// Delete removes flows, each known by its reply tuple and zone. A flow
	// that is no longer there, or now leads to another endpoint, is left
	// alone: this is no error. removed[i] tells whether flows[i] was there. On
	// an error some flows may have been removed.
	Delete(ctx context.Context, flows []Flow) (removed []bool, err error)

	// DeleteMatching removes all flows that m selects, of all zones, in one
	// walk over the table. m has an address and a reply source. The error is
	// ErrNotSupported where the kernel cannot do it: never for IPv6.
	DeleteMatching(ctx context.Context, m Match) error
}

// Events is where news of flows comes from.
type Events interface {
	// Subscribe returns when each new UDP flow to one of the ports will be
	// reported.
	Subscribe(ports []uint16) (Subscription, error)
}

// Subscription reports new flows.
type Subscription interface {
	// Next waits for the next new flow. After ErrEventsLost it can be called
	// again; after Close it returns net.ErrClosed; any other error is final.
	Next() (Flow, error)

	// Close ends the subscription, and a Next that waits.
	Close() error
}

// Host is the rest of what the kernel tells.
type Host interface {
	// Timeouts reads the UDP timeouts.
	Timeouts() (Timeouts, error)

	// VirtualServers lists the UDP virtual servers of IPVS, none where there
	// is no IPVS.
	VirtualServers() ([]netip.AddrPort, error)
}
