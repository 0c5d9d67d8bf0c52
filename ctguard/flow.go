package ctguard

import (
	"fmt"
	"net/netip"
	"time"
)

// Tuple is one direction of a flow.
type Tuple struct {
	Src, Dst netip.AddrPort

	// Zone is the conntrack zone of this direction alone, as set by nft's
	// "ct original zone set" or iptables' "CT --zone-orig".
	Zone uint16
}

// Flow is one entry of the connection tracking table.
type Flow struct {
	// Proto is the IP protocol number. A [Table] reports UDP only, but a
	// policy has to be right about everything.
	Proto uint8

	// Orig is the flow as its client sees it: Orig.Dst is the frontend.
	Orig Tuple

	// Reply is what comes back: Reply.Src is the endpoint to which the flow
	// leads, or the frontend itself where nothing was translated. Reply.Dst
	// need not be Orig.Src: masquerading, and the kernel's evasion of port
	// clashes, change it.
	Reply Tuple

	// Zone is the conntrack zone of both directions.
	Zone uint16

	// Remaining is the time until the entry expires if no packet comes, in
	// whole seconds, rounded down.
	Remaining time.Duration

	// Offloaded tells that packets go past connection tracking (a flowtable,
	// Linux 4.16): as long as they do, the kernel tells no Remaining, and
	// before 6.4 refuses to delete the entry (EBUSY).
	Offloaded bool

	// SeenReply and Assured are the entry's status bits.
	SeenReply, Assured bool

	// Packets and Replies count packets in the original and in the reply
	// direction, zero where accounting is off (nf_conntrack_acct).
	Packets, Replies uint64

	// Start is when the entry was made: zero unless nf_conntrack_timestamp
	// is on.
	Start time.Time
}

// String gives the flow as client -> frontend => endpoint.
func (f Flow) String() string {
	s := fmt.Sprintf("%v -> %v => %v", f.Orig.Src, f.Orig.Dst, f.Reply.Src)
	if z := f.OriginalZone(); z != 0 {
		s += fmt.Sprintf(" zone %d", z)
	}
	return s
}

// OriginalZone is the conntrack zone in which the flow's first packet was looked up.
func (f Flow) OriginalZone() uint16 {
	if f.Zone != 0 {
		return f.Zone
	}
	return f.Orig.Zone
}

// Unanswered tells whether packets of the client wait for a reply, as far as is
// known: without accounting, only of a flow that has never had one.
func (f Flow) Unanswered() bool { return !f.SeenReply || f.Packets > f.Replies }

// Age is how long the flow has been there, and whether that is known.
func (f Flow) Age(now time.Time) (time.Duration, bool) {
	if f.Start.IsZero() {
		return 0, false
	}
	return max(now.Sub(f.Start), 0), true
}

// Timeouts are the kernel's UDP timeouts.
type Timeouts struct {
	// Unreplied is net.netfilter.nf_conntrack_udp_timeout. It also holds for
	// replied flows in their first two seconds.
	Unreplied time.Duration

	// Stream is net.netfilter.nf_conntrack_udp_timeout_stream.
	Stream time.Duration
}

// DefaultTimeouts are the kernel's own (the stream timeout is 180 s on older
// kernels).
func DefaultTimeouts() Timeouts {
	return Timeouts{Unreplied: 30 * time.Second, Stream: 120 * time.Second}
}

// longest is the longest that a silent UDP flow can last.
func (t Timeouts) longest() time.Duration { return max(t.Unreplied, t.Stream) }

// Idle is the time for which the flow has certainly carried no packet. Every
// packet, of either direction, sets the entry's timer anew, so that the idle
// time is what has run off the timer. It is a lower bound on purpose, since a
// flow wrongly taken for idle loses a reply:
//
//   - The entry does not tell which timeout it was last given. What exceeds the
//     shorter was given the longer; anything else is taken for the shorter. That
//     is the unreplied one, unless somebody has set the stream timeout below it.
//     (The assured bit would tell on newer kernels; older ones set it with the
//     first reply.)
//   - One second is taken off: the kernel reports whole seconds, rounded
//     down, and older kernels move a timer only when it changes by a second.
//   - Nothing is known of a flow that is offloaded.
func (t Timeouts) Idle(f Flow) time.Duration {
	if f.Offloaded {
		return 0
	}
	full := min(t.Unreplied, t.Stream)
	if f.Remaining > full {
		full = t.longest()
	}
	return max(full-f.Remaining-time.Second, 0)
}
