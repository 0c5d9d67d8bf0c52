package ctguard

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"
)

// Kernel is the connection tracking table of a network namespace. It
// implements [Table], [Events] and [Host], needs CAP_NET_ADMIN there, and is
// safe for concurrent use.
type Kernel struct {
	ns      int
	sysctls sysctls
	dial    func() (transport, error)

	// Conclusive answers about this kernel: it ignores filters of dumps, or
	// refuses those of deletions.
	ignoresFilter atomic.Bool
	refusesFilter atomic.Bool

	dumps, interrupted, messages, bytes atomic.Uint64
}

var (
	_ Table  = (*Kernel)(nil)
	_ Events = (*Kernel)(nil)
	_ Host   = (*Kernel)(nil)
)

// KernelStats counts what the kernel was asked for.
type KernelStats struct {
	Dumps       uint64 `json:"dumps"`       // walks over the table to read it
	Interrupted uint64 `json:"interrupted"` // of these, those that had to be repeated
	Messages    uint64 `json:"messages"`    // netlink messages sent
	Bytes       uint64 `json:"bytes"`       // bytes read from netlink, without events

	// NoDumpFilter and NoDeleteFilter tell that this kernel has shown that it
	// sends the whole table whatever the filter, or refuses to delete by one.
	NoDumpFilter   bool `json:"noDumpFilter"`
	NoDeleteFilter bool `json:"noDeleteFilter"`
}

// OpenKernel opens the table of the network namespace with the file
// descriptor ns, or of the calling thread's if ns is 0. Its files under /proc
// are those of the calling thread's namespace in either case; so a caller that
// gives ns has to call from a thread in that namespace.
//
// The kernel needs ctnetlink (nf_conntrack_netlink), which it loads by itself.
func OpenKernel(ns int) (*Kernel, error) {
	k := &Kernel{ns: ns, dial: func() (transport, error) { return openSocket(ns) }}
	// This also has the kernel load what it needs, so that the files are there.
	if _, err := k.Usage(); err != nil {
		return nil, fmt.Errorf("conntrack table: %w", err)
	}
	k.sysctls = openSysctls()
	return k, nil
}

// Close releases what OpenKernel opened. Subscriptions have their own Close.
func (k *Kernel) Close() error { return k.sysctls.Close() }

// Stats tells what the kernel was asked for so far.
func (k *Kernel) Stats() KernelStats {
	return KernelStats{
		Dumps:       k.dumps.Load(),
		Interrupted: k.interrupted.Load(),
		Messages:    k.messages.Load(),
		Bytes:       k.bytes.Load(),

		NoDumpFilter: k.ignoresFilter.Load(), NoDeleteFilter: k.refusesFilter.Load(),
	}
}

// errStop ends a dump whose reader has had enough.
var errStop = errors.New("stop")

// Flows implements [Table]. The kernel sends the matching flows only (Linux
// 5.8, CTA_FILTER); older ones ignore the filter and send everything, which
// is then sorted out here, in memory that does not grow with the table. Every
// flow is compared with the match again in either case.
func (k *Kernel) Flows(ctx context.Context, matches []Match) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		if err := k.flows(ctx, matches, func(f Flow) bool { return yield(f, nil) }); err != nil && !errors.Is(err, errStop) {
			yield(Flow{}, fmt.Errorf("dump conntrack table: %w", err))
		}
	}
}

func (k *Kernel) flows(ctx context.Context, matches []Match, yield func(Flow) bool) error {
	if len(matches) == 0 || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	t, err := k.dial()
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	// A closed socket is how a dump is abandoned: the kernel has nothing else.
	defer context.AfterFunc(ctx, func() { _ = t.Close() })()

	if k.ignoresFilter.Load() {
		err = k.dumpAll(t, make([]byte, datagramSize), matches, yield)
	} else {
		buf := make([]byte, filteredSize)
		for _, m := range matches {
			if err = k.dumpMatching(t, buf, m, yield); err != nil {
				break
			}
		}
	}
	if errors.Is(err, ErrInterrupted) {
		k.interrupted.Add(1)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// dumpMatching reads the flows of one match.
func (k *Kernel) dumpMatching(t transport, buf []byte, m Match, yield func(Flow) bool) error {
	req, err := dumpRequest(m)
	if err != nil {
		return err
	}
	return k.dump(t, buf, req, func(h netlink.Header, data []byte) error {
		if port, ok := udpDstPort(data); ok && port == m.Dst.Port() {
			f, err := decode(h, data)
			if err != nil {
				return err
			}
			if m.Matches(f) {
				return stopUnless(yield(f))
			}
			if m.selects(f) {
				return nil
			}
		}
		// Not what was asked for: the kernel does not know the filter. From
		// now on, one walk for all matches is the better way.
		k.ignoresFilter.Store(true)
		return ErrInterrupted
	})
}

// dumpAll reads the whole table and picks the flows that some match selects.
// Minimum: Linux 2.6.14.
func (k *Kernel) dumpAll(t transport, buf []byte, matches []Match, yield func(Flow) bool) error {
	family := matches[0].family()
	for _, m := range matches {
		if m.family() != family {
			family = netfilter.ProtoUnspec // both
		}
	}
	req, err := dumpAllRequest(family)
	if err != nil {
		return err
	}
	ports := make(map[uint16]bool, len(matches))
	for _, m := range matches {
		ports[m.Dst.Port()] = true
	}
	return k.dump(t, buf, req, func(h netlink.Header, data []byte) error {
		// Most entries are foreign: do not decode them.
		if port, ok := udpDstPort(data); !ok || !ports[port] {
			return nil
		}
		f, err := decode(h, data)
		if err != nil {
			return err
		}
		for _, m := range matches {
			if m.Matches(f) {
				return stopUnless(yield(f))
			}
		}
		return nil
	})
}

func stopUnless(goOn bool) error {
	if goOn {
		return nil
	}
	return errStop
}

// dump sends a dump request and hands each entry of the answer to fn.
func (k *Kernel) dump(t transport, buf []byte, req netlink.Message, fn func(netlink.Header, []byte) error) error {
	k.dumps.Add(1)
	k.messages.Add(1)
	if err := t.send([]netlink.Message{req}); err != nil {
		return err
	}
	for done, interrupted := false, false; ; {
		n, err := t.receive(buf)
		if err != nil {
			return err
		}
		k.bytes.Add(uint64(n))
		err = messages(buf[:n], func(h netlink.Header, data []byte) error {
			interrupted = interrupted || h.Flags&netlink.DumpInterrupted != 0
			switch h.Type {
			case netlink.Done, netlink.Error:
				done = true
				return errno(data)
			case netlink.Overrun:
				return ErrInterrupted
			case netlink.Noop:
				return nil
			default:
				return fn(h, data)
			}
		})
		switch {
		case err != nil:
			return err
		case done && interrupted:
			return ErrInterrupted
		case done:
			return nil
		}
	}
}

// deleteBatch is how many deletions go to the kernel at once. Each can come
// back as an error message of up to 1 KiB of socket buffer, 208 KiB by default.
const deleteBatch = 128

// Delete implements [Table]: one message for each flow, by reply tuple and
// zone, many in a datagram. Minimum: Linux 2.6.14; for the zone of one
// direction 4.3.
func (k *Kernel) Delete(ctx context.Context, flows []Flow) ([]bool, error) {
	removed := make([]bool, len(flows))
	t, err := k.dial()
	if err != nil {
		return removed, err
	}
	defer func() { _ = t.Close() }()
	var errs []error
	for start := 0; start < len(flows) && ctx.Err() == nil; start += deleteBatch {
		end := min(start+deleteBatch, len(flows))
		es, err := k.deleteBatch(t, flows[start:end], removed[start:end])
		errs = append(errs, es...)
		if err != nil {
			return removed, errors.Join(append(errs, err)...)
		}
	}
	if ctx.Err() != nil {
		errs = append(errs, context.Cause(ctx))
	}
	return removed, errors.Join(errs...)
}

// deleteBatch deletes up to deleteBatch flows. It returns the errors of single
// flows, and that of the whole.
func (k *Kernel) deleteBatch(t transport, flows []Flow, removed []bool) (each []error, err error) {
	msgs := make([]netlink.Message, len(flows))
	for i, f := range flows {
		if msgs[i], err = deleteRequest(f); err != nil {
			return nil, fmt.Errorf("delete %v: %w", f, err)
		}
		msgs[i].Header.Sequence = uint32(i + 1)
		removed[i] = true
	}
	// The kernel answers in order, and without being asked only what went
	// wrong. The answer to the last one says that all have been dealt with.
	last := uint32(len(msgs))
	msgs[last-1].Header.Flags |= netlink.Acknowledge
	k.messages.Add(uint64(last))
	if err := t.send(msgs); err != nil {
		clear(removed)
		return nil, fmt.Errorf("delete %d flows: %w", len(flows), err)
	}
	buf := make([]byte, answerSize)
	for done := false; !done; {
		n, err := t.receive(buf)
		if err != nil {
			clear(removed) // nobody knows
			return each, fmt.Errorf("delete %d flows: %w", len(flows), err)
		}
		k.bytes.Add(uint64(n))
		err = messages(buf[:n], func(h netlink.Header, data []byte) error {
			if h.Type != netlink.Error || h.Sequence == 0 || h.Sequence > last {
				return nil
			}
			done = done || h.Sequence == last
			if err := errno(data); err != nil {
				i := h.Sequence - 1
				removed[i] = false
				// ENOENT: already gone, or moved to another endpoint.
				if !errors.Is(err, unix.ENOENT) {
					each = append(each, fmt.Errorf("delete %v: %w", flows[i], err))
				}
			}
			return nil
		})
		if err != nil {
			clear(removed)
			return each, fmt.Errorf("delete %d flows: %w", len(flows), err)
		}
	}
	return each, nil
}

// DeleteMatching implements [Table]. Minimum: about Linux 6.12 (commit
// 1ef7f50ccc6e), which is found out by trying; older kernels refuse, since the
// tuple in the message is incomplete. Not for IPv6 (see Match.exact).
func (k *Kernel) DeleteMatching(_ context.Context, m Match) error {
	if k.refusesFilter.Load() {
		return fmt.Errorf("delete by filter: %w", ErrNotSupported)
	}
	req, err := deleteMatchingRequest(m)
	if err != nil {
		return err
	}
	t, err := k.dial()
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	err = k.acknowledged(t, req)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		k.refusesFilter.Store(true)
		return fmt.Errorf("delete by filter: %w (%w)", ErrNotSupported, err)
	}
	if err != nil {
		return fmt.Errorf("delete flows %v => %v: %w", m.Dst, m.Src, err)
	}
	return nil
}

// acknowledged sends a request and waits for the kernel's word on it.
func (k *Kernel) acknowledged(t transport, req netlink.Message) error {
	k.messages.Add(1)
	if err := t.send([]netlink.Message{req}); err != nil {
		return err
	}
	buf := make([]byte, answerSize)
	for {
		n, err := t.receive(buf)
		if err != nil {
			return err
		}
		k.bytes.Add(uint64(n))
		done := false
		err = messages(buf[:n], func(h netlink.Header, data []byte) error {
			if h.Type != netlink.Error {
				return nil
			}
			done = true
			return errno(data)
		})
		if done || err != nil {
			return err
		}
	}
}

// udpDstPort reads the original destination port of a UDP flow from the fixed
// places in which ctnetlink puts it (see eventFilter), without decoding.
func udpDstPort(data []byte) (uint16, bool) {
	if len(data) == 0 {
		return 0, false
	}
	at, ok := ipv4Offsets(), netfilter.ProtoFamily(data[0]) == netfilter.ProtoIPv4
	if netfilter.ProtoFamily(data[0]) == netfilter.ProtoIPv6 {
		at, ok = ipv6Offsets(), true
	}
	port := at.dstPort - unix.NLMSG_HDRLEN
	if !ok || len(data) < port+2 || data[at.proto-unix.NLMSG_HDRLEN] != unix.IPPROTO_UDP {
		return 0, false
	}
	return uint16(data[port])<<8 | uint16(data[port+1]), true
}
