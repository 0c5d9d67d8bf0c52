package ctguard

import (
	"errors"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"github.com/ti-mo/conntrack"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"
)

// decodeByLibrary is decode, as the library does it.
func decodeByLibrary(h netlink.Header, data []byte) (Flow, error) {
	var e conntrack.Event
	if err := e.Unmarshal(netlink.Message{Header: h, Data: data}); err != nil {
		return Flow{}, err
	}
	if e.Flow == nil {
		return Flow{}, errors.New("no flow")
	}
	f := e.Flow
	tuple := func(t conntrack.Tuple) Tuple {
		return Tuple{
			Src:  netip.AddrPortFrom(t.IP.SourceAddress, t.Proto.SourcePort),
			Dst:  netip.AddrPortFrom(t.IP.DestinationAddress, t.Proto.DestinationPort),
			Zone: t.Zone,
		}
	}
	return Flow{
		Proto: f.TupleOrig.Proto.Protocol, Orig: tuple(f.TupleOrig), Reply: tuple(f.TupleReply), Zone: f.Zone,
		Remaining: time.Duration(f.Timeout) * time.Second,
		SeenReply: f.Status&conntrack.StatusSeenReply != 0, Assured: f.Status&conntrack.StatusAssured != 0,
		Packets: f.CountersOrig.Packets, Replies: f.CountersReply.Packets, Start: f.Timestamp.Start,
	}, nil
}

// TestKernelDecode compares with the library on what this kernel sends, with
// packets counted and flows dated.
func TestKernelDecode(t *testing.T) {
	n := newNamespace(t)
	n.setSysctl("net/netfilter/nf_conntrack_acct", "1")
	n.setSysctl("net/netfilter/nf_conntrack_timestamp", "1")
	k := n.kernel()
	n.addAddr("lo", "10.96.0.10/32")
	n.addAddr("lo", "10.244.0.3/32")
	n.rules(route{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(podA)})
	go answer(n.listen(podA))
	c := n.listen("127.0.0.1:0")
	for range 3 {
		if who := query(t, c, vip4, time.Second); who != podA {
			t.Fatalf("%q answered", who)
		}
	}
	n.fill(mixture(100))
	req, err := dumpAllRequest(netfilter.ProtoUnspec)
	if err != nil {
		t.Fatal(err)
	}
	s, err := k.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	entries, counted := 0, false
	err = k.dump(s, make([]byte, datagramSize), req, func(h netlink.Header, data []byte) error {
		entries++
		want, err := decodeByLibrary(h, data)
		if err != nil {
			return err
		}
		got, err := decode(h, data)
		if err != nil {
			return err
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("entry (-library +got):\n%s", diff)
		}
		if got.Packets == 3 && got.Replies == 3 {
			age, known := got.Age(time.Now())
			counted = known && age < time.Minute && got.SeenReply
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if entries < 100 || !counted {
		t.Errorf("%d entries; the one with three queries and answers is there: %v", entries, counted)
	}
}

func TestDecodeRefuses(t *testing.T) {
	whole, err := createRequest(flow("10.244.1.1:1", vip4, podA))
	if err != nil {
		t.Fatal(err)
	}
	h := netlink.Header{Type: typeNew}
	if _, err := decode(h, whole.Data); err != nil {
		t.Fatal(err)
	}
	if _, err := decode(netlink.Header{Type: 0x0a00}, whole.Data); err == nil {
		t.Error("a message of nftables is no flow")
	}
	deleted := netlink.Header{Type: 0x0102}
	if _, err := decode(deleted, whole.Data); err == nil {
		t.Error("the end of a flow is no flow")
	}
	// The reply tuple ends at 4 + 2*52.
	for n := range 4 + 2*52 {
		if _, err := decode(h, whole.Data[:n]); err == nil {
			t.Errorf("a flow in %d bytes", n)
		}
	}
}

// TestDecodeOffloaded: of an entry whose packets go past connection tracking the
// kernel tells no timer. It is not idle for that.
func TestDecodeOffloaded(t *testing.T) {
	want := flow("10.244.1.1:1", vip4, podA)
	tuples := []netfilter.Attribute{
		tuple(ctaTupleOrig, endOf(want.Orig.Src), endOf(want.Orig.Dst), 0),
		tuple(ctaTupleReply, endOf(want.Reply.Src), endOf(want.Reply.Dst), 0),
	}
	status := func(bits uint32) netfilter.Attribute { return attr(ctaStatus, netfilter.Uint32Bytes(bits)) }
	timer := attr(ctaTimeout, netfilter.Uint32Bytes(100))
	p := NewPolicy(services(kubeDNS(endpoint(podA, nil, new(true)), endpoint(podB, nil, nil))), Facts{})
	for _, tt := range []struct {
		name  string
		attrs []netfilter.Attribute
		want  Reason
	}{
		{"ordinary", []netfilter.Attribute{status(statusSeenReply), timer}, TerminatingIdle},
		{"in a flowtable", []netfilter.Attribute{status(statusSeenReply | 1<<14)}, TerminatingBusy},
		{"in hardware", []netfilter.Attribute{status(statusSeenReply | 1<<15), timer}, TerminatingBusy},
		{"no timer", []netfilter.Attribute{status(statusSeenReply)}, TerminatingBusy},
	} {
		t.Run(tt.name, func(t *testing.T) {
			msg, err := request(ctGet, netfilter.ProtoIPv4, 0, append(tuples, tt.attrs...))
			if err != nil {
				t.Fatal(err)
			}
			f, err := decode(netlink.Header{Type: typeNew}, msg.Data)
			if err != nil {
				t.Fatal(err)
			}
			if _, r := p.Decide(f); r != tt.want {
				t.Errorf("%+v: %v, want %v", f, r, tt.want)
			}
		})
	}
}

// wide tells whether an attribute in b, or in what may be its payload, has a
// type of more than eight bits.
func wide(b []byte) bool {
	attrs := attributes{rest: b}
	for typ, b, ok := attrs.next(); ok; typ, b, ok = attrs.next() {
		if typ > math.MaxUint8 || wide(b) {
			return true
		}
	}
	return false
}

// FuzzDecode: where decode and the library both read a UDP flow, it is the
// same, and nothing makes decode panic. (They differ in what no kernel sends:
// the library takes attributes of length 0, and reads eight bits of a type.)
func FuzzDecode(f *testing.F) {
	for _, fl := range []Flow{flow("10.244.1.1:1", vip4, podA), flow("[fd00::1]:1", vip6, pod6)} {
		fl.Zone = 7
		msg, err := createRequest(fl)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(msg.Data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		h := netlink.Header{Type: typeNew}
		got, err := decode(h, data)
		want, libErr := decodeByLibrary(h, data)
		want.Offloaded = got.Offloaded // which the library does not tell
		if err == nil && libErr == nil && want.Proto == unix.IPPROTO_UDP && got != want && !wide(data[4:]) {
			t.Fatalf("got %+v, the library %+v", got, want)
		}
	})
}
