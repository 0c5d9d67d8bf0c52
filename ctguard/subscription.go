package ctguard

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/netfilter"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// eventBuffer is the room for events that wait to be read, in bytes. 4 MiB
// hold about 5,000 events; the default of 208 KiB overflows in a burst.
const eventBuffer = 4 << 20

// Subscribe implements [Events]. The kernel drops every event but those of
// new UDP flows to the ports, in a socket filter that is there before the
// first event can be. Minimum: Linux 2.6.14. Where the sysctl
// net.netfilter.nf_conntrack_events is 0 there are no events: this is an
// error, in the hope that somebody changes it.
func (k *Kernel) Subscribe(ports []uint16) (Subscription, error) {
	return k.subscribe(ports, eventBuffer)
}

func (k *Kernel) subscribe(ports []uint16, buffer int) (*subscription, error) {
	if on, err := k.sysctls.events.value(); err == nil && on == 0 {
		return nil, fmt.Errorf("subscribe to conntrack events: net.netfilter.nf_conntrack_events is 0")
	}
	filter, err := eventFilter(ports)
	if err != nil {
		return nil, fmt.Errorf("subscribe to conntrack events: %w", err)
	}
	s, err := openSocket(k.ns)
	if err != nil {
		return nil, err
	}
	err = s.conn.SetReadBuffer(buffer)
	if err == nil {
		err = s.conn.SetBPF(filter)
	}
	if err == nil {
		err = s.conn.JoinGroup(uint32(netfilter.GroupCTNew))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to conntrack events: %w", err), s.Close())
	}
	return &subscription{transport: s, ports: slices.Clone(ports), buf: make([]byte, answerSize)}, nil
}

// subscription is a [Subscription] to the kernel's events.
type subscription struct {
	transport
	ports []uint16
	buf   []byte
	ready []Flow // read already, in reverse order
}

// Next implements [Subscription].
func (s *subscription) Next() (Flow, error) {
	for len(s.ready) == 0 {
		n, err := s.receive(s.buf)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return Flow{}, ErrEventsLost
		case err != nil:
			return Flow{}, fmt.Errorf("receive conntrack event: %w", err)
		}
		err = messages(s.buf[:n], func(h netlink.Header, data []byte) error {
			f, err := decode(h, data)
			if err == nil && f.Proto == unix.IPPROTO_UDP && slices.Contains(s.ports, f.Orig.Dst.Port()) {
				s.ready = append(s.ready, f)
			}
			return err
		})
		slices.Reverse(s.ready)
		if err != nil {
			return Flow{}, fmt.Errorf("receive conntrack event: %w", err)
		}
	}
	last := len(s.ready) - 1
	f := s.ready[last]
	s.ready = s.ready[:last]
	return f, nil
}

// offsets are where ctnetlink puts what the filter needs, in bytes from the
// start of a message. They are fixed: the netlink header (16) is followed by
// nfgenmsg (4), and CTA_TUPLE_ORIG comes first in events and dumps alike. In
// it, each of the nested attributes has a header of 4 and is padded to 4:
// CTA_TUPLE_IP { source, destination }, CTA_TUPLE_PROTO { number, source port,
// destination port }.
type offsets struct{ proto, dstPort int }

const familyOffset = 16 // nfgenmsg.nfgen_family

func ipv4Offsets() offsets { return offsets{proto: 52, dstPort: 68} }
func ipv6Offsets() offsets { return offsets{proto: 76, dstPort: 92} }

// maxFilterPorts is how many ports the filter compares: beyond, it lets every
// UDP flow pass. A conditional jump of BPF spans at most 255 instructions.
const maxFilterPorts = 64

// eventFilter is a socket filter that lets pass messages on UDP flows to one
// of the ports.
func eventFilter(ports []uint16) ([]bpf.RawInstruction, error) {
	const pass, drop = 0xffffffff, 0
	tail := []bpf.Instruction{}
	if len(ports) <= maxFilterPorts {
		for i, p := range ports {
			// On equality over the remaining comparisons and the drop.
			tail = append(tail, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(p), SkipTrue: uint8(len(ports) - i)})
		}
		tail = append(tail, bpf.RetConstant{Val: drop})
	}
	tail = append(tail, bpf.RetConstant{Val: pass})

	family := func(at offsets, next uint8) []bpf.Instruction {
		return []bpf.Instruction{
			bpf.LoadAbsolute{Off: uint32(at.proto), Size: 1},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 1},
			bpf.RetConstant{Val: drop},
			bpf.LoadAbsolute{Off: uint32(at.dstPort), Size: 2},
			bpf.Jump{Skip: uint32(next)},
		}
	}
	v4, v6 := family(ipv4Offsets(), 5), family(ipv6Offsets(), 0)
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: familyOffset, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipTrue: uint8(1 + len(v4))},
		bpf.RetConstant{Val: drop},
	}
	prog = slices.Concat(prog, v4, v6, tail)
	return bpf.Assemble(prog)
}
