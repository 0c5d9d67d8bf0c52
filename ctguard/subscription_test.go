package ctguard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// TestEventFilter runs the filter on messages that are laid out as the
// kernel's.
func TestEventFilter(t *testing.T) {
	many := make([]uint16, maxFilterPorts)
	for i := range many {
		many[i] = uint16(1000 + i)
	}
	tcp := flow("10.244.1.1:40000", vip4, podA)
	tcp.Proto = unix.IPPROTO_TCP
	tcp6 := flow("[fd00::1]:40000", vip6, pod6)
	tcp6.Proto = unix.IPPROTO_TCP
	for _, tt := range []struct {
		name  string
		ports []uint16
		flow  Flow
		want  bool
	}{
		{"IPv4", []uint16{53}, flow("10.244.1.1:40000", vip4, podA), true},
		{"IPv6", []uint16{53}, flow("[fd00::1]:40000", vip6, pod6), true},
		{"IPv4, last of several ports", []uint16{30053, 5300, 53}, flow("10.244.1.1:40000", vip4, podA), true},
		{"IPv6, first of several ports", []uint16{53, 30053}, flow("[fd00::1]:40000", vip6, pod6), true},
		{"IPv4, other port", []uint16{53}, flow("10.244.1.1:53", "10.96.0.10:9153", "10.244.0.3:53"), false},
		{"IPv6, other port", []uint16{53}, flow("[fd00::1]:53", "[fd00::2]:5300", "[fd00::3]:53"), false},
		{"IPv4, TCP", []uint16{53}, tcp, false},
		{"IPv6, TCP", []uint16{53}, tcp6, false},
		{"no ports", nil, flow("10.244.1.1:40000", vip4, podA), false},
		{"as many ports as can be, the first", many, flow("10.244.1.1:40000", "10.96.0.10:1000", podA), true},
		{"the last", many, flow("10.244.1.1:40000", "10.96.0.10:1063", podA), true},
		{"none of them", many, flow("10.244.1.1:40000", vip4, podA), false},
		{"too many ports: any passes", append(slices.Clone(many), 2), flow("10.244.1.1:40000", vip4, podA), true},
		{"but not TCP", append(slices.Clone(many), 2), tcp, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			raw, err := eventFilter(tt.ports)
			if err != nil {
				t.Fatal(err)
			}
			prog, ok := bpf.Disassemble(raw)
			if !ok {
				t.Fatal("filter does not disassemble")
			}
			vm, err := bpf.NewVM(prog)
			if err != nil {
				t.Fatal(err)
			}
			msg, err := createRequest(tt.flow)
			if err != nil {
				t.Fatal(err)
			}
			msg.Header.Length = uint32(unix.NLMSG_HDRLEN + len(msg.Data))
			b, err := msg.MarshalBinary()
			if err != nil {
				t.Fatal(err)
			}
			n, err := vm.Run(b)
			if err != nil {
				t.Fatal(err)
			}
			if got := n != 0; got != tt.want {
				t.Errorf("passes %v, want %v", got, tt.want)
			}
			port, udp := udpDstPort(msg.Data)
			if udp != (tt.flow.Proto == unix.IPPROTO_UDP) || udp && port != tt.flow.Orig.Dst.Port() {
				t.Errorf("udpDstPort = %d, %v", port, udp)
			}
		})
	}
}

// TestEventFilterShortMessages: BPF ends with a drop where it reads beyond.
func TestEventFilterShortMessages(t *testing.T) {
	msg, err := createRequest(flow("[fd00::1]:40000", vip6, pod6))
	if err != nil {
		t.Fatal(err)
	}
	for n := range msg.Data {
		if port, ok := udpDstPort(msg.Data[:n]); ok && n < ipv6Offsets().dstPort+2-unix.NLMSG_HDRLEN {
			t.Fatalf("%d bytes: port %d", n, port)
		}
	}
}

// send sends a datagram from a socket of its own in the namespace.
func (n *namespace) send(to string) {
	n.t.Helper()
	local := "127.0.0.1:0"
	if netip.MustParseAddrPort(to).Addr().Is6() {
		local = "[::1]:0"
	}
	c := n.listen(local)
	if _, err := c.WriteToUDPAddrPort([]byte("hello"), netip.MustParseAddrPort(to)); err != nil {
		n.t.Fatal(err)
	}
}

// next reads an event, and fails the test if none comes.
func next(t *testing.T, s Subscription) (Flow, error) {
	t.Helper()
	late := time.AfterFunc(10*time.Second, func() { _ = s.Close() })
	defer late.Stop()
	f, err := s.Next()
	if errors.Is(err, net.ErrClosed) {
		t.Fatal("no event")
	}
	return f, err
}

// TestKernelEvents sends packets of all kinds, and wants to see those to the
// watched ports, and no others.
func TestKernelEvents(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	for _, a := range []string{"10.96.0.10/32", "10.244.0.3/32", "fd00:10:96::a/128", "fd00:10:244::3/128"} {
		n.addAddr("lo", a)
	}
	n.rules(
		route{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(podA)},
		route{netip.MustParseAddrPort(vip6), netip.MustParseAddrPort(pod6)},
	)
	// IPv6 drops packets in the first moments of a namespace.
	for _, to := range []string{"[fd00:10:96::a]:55", "[fd00:10:244::3]:55"} {
		eventually(t, "IPv6 flow", func() bool {
			n.send(to)
			return len(collect(t, k, match(to))) > 0
		})
	}
	s, err := k.Subscribe([]uint16{53, 5300})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, to := range []string{
		"10.96.0.10:54", vip4, "[fd00:10:96::a]:54", vip6, "127.0.0.1:5353", "10.96.0.10:5300", "[fd00:10:96::a]:5300",
	} {
		n.send(to)
	}
	// TCP to the same place: refused, but tracked.
	n.do(func() error {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", vip4)
		if err == nil {
			_ = c.Close()
		}
		return nil
	})
	n.send("10.96.0.10:53") // the last one

	type seen struct{ dst, src netip.AddrPort }
	want := []seen{
		{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(podA)},
		{netip.MustParseAddrPort(vip6), netip.MustParseAddrPort(pod6)},
		{netip.MustParseAddrPort("10.96.0.10:5300"), netip.MustParseAddrPort("10.96.0.10:5300")},
		{netip.MustParseAddrPort("[fd00:10:96::a]:5300"), netip.MustParseAddrPort("[fd00:10:96::a]:5300")},
		{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(podA)},
	}
	var got []seen
	defer func() {
		if t.Failed() {
			t.Logf("events: %v\nin the table: %v", got, collectAll(t, k, match("0.0.0.0:53"), match("[::]:53"), match("0.0.0.0:5300"), match("[::]:5300")))
		}
	}()
	for range want {
		f, err := next(t, s)
		if err != nil {
			t.Fatal(err)
		}
		if f.Remaining == 0 {
			t.Errorf("event without the timeout: %v", f)
		}
		got = append(got, seen{f.Orig.Dst, f.Reply.Src})
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b seen) bool { return a == b })); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestKernelEventsLost fills a small buffer.
func TestKernelEventsLost(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	s, err := k.subscribe([]uint16{53}, 16<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	many := func(net, count int) (flows []Flow) {
		for i := range count {
			flows = append(flows, flow(fmt.Sprintf("10.244.%d.1:%d", net, 1024+i), vip4, podA))
		}
		return flows
	}
	n.fill(foreign(1000)) // these are not in the way
	n.fill(many(1, 500))
	if _, err := next(t, s); !errors.Is(err, ErrEventsLost) {
		t.Fatalf("500 events that nobody reads: %v", err)
	}
	// It goes on, with what is in the buffer, and then with what comes.
	old, fresh := 0, 0
	for _, f := range many(2, 500) {
		n.fill([]Flow{f})
		got, err := next(t, s)
		switch {
		case errors.Is(err, ErrEventsLost):
		case err != nil:
			t.Fatal(err)
		case got.Orig.Src.Addr() == f.Orig.Src.Addr():
			fresh++
		default:
			old++
		}
	}
	if old == 0 || fresh == 0 {
		t.Errorf("%d old and %d fresh events", old, fresh)
	}
}

func TestKernelEventsOff(t *testing.T) {
	n := newNamespace(t)
	k := n.kernel()
	n.setSysctl("net/netfilter/nf_conntrack_events", "0")
	if s, err := k.Subscribe([]uint16{53}); err == nil {
		_ = s.Close()
		t.Error("subscribed, though there are no events")
	}
	n.setSysctl("net/netfilter/nf_conntrack_events", "1")
	s, err := k.Subscribe([]uint16{53})
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
}

// script is a kernel that says what it is told to.
type script struct {
	sent    [][]byte
	answers [][]byte // datagrams
	err     error    // after these
}

func (s *script) datagram(parts ...[]byte) { s.answers = append(s.answers, slices.Concat(parts...)) }

// part is one netlink message.
func part(typ, flags uint16, seq uint32, data []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, data...)
	return append(b, make([]byte, -len(b)&3)...)
}
