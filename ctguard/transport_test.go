package ctguard

import (
	"encoding/binary"
	"errors"
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

func (s *script) send(msgs []netlink.Message) error {
	for _, m := range msgs {
		s.sent = append(s.sent, m.Data)
	}
	return nil
}

func (s *script) receive(buf []byte) (int, error) {
	if len(s.answers) == 0 {
		if s.err == nil {
			return 0, net.ErrClosed
		}
		return 0, s.err
	}
	n := copy(buf, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

func (s *script) Close() error { return nil }

// scripted is a Kernel that talks to the scripts, one for each operation.
func scripted(scripts ...*script) *Kernel {
	return &Kernel{dial: func() (transport, error) {
		if len(scripts) == 0 {
			return nil, unix.EMFILE
		}
		s := scripts[0]
		scripts = scripts[1:]
		return s, nil
	}}
}

const (
	typeNew = 0x0100 // NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_NEW
	multi   = unix.NLM_F_MULTI
	intr    = unix.NLM_F_DUMP_INTR
)

func entry(t *testing.T, flags uint16, f Flow) []byte {
	t.Helper()
	msg, err := createRequest(f)
	if err != nil {
		t.Fatal(err)
	}
	return part(typeNew, flags, 1, msg.Data)
}

func number(n int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(n)) }

// TestDumpScripts has what this machine's kernel does not do.
func TestDumpScripts(t *testing.T) {
	a, b := flow("10.244.1.1:1", vip4, podA), flow("10.244.1.1:2", vip4, podB)
	other := flow("10.244.1.1:3", "10.96.0.11:53", podA)
	six, other6 := flow("[fd00::1]:1", vip6, pod6), flow("[fd00::1]:2", "[fd00:10:96::b]:53", pod6)
	done := part(unix.NLMSG_DONE, multi, 1, number(0))
	for _, tt := range []struct {
		name    string
		match   Match
		script  func(s *script)
		want    []Flow
		wantErr error
		ignores bool
	}{
		{"two datagrams", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a), entry(t, multi, b))
			s.datagram(done)
		}, []Flow{a, b}, nil, false},
		{"done in the same datagram", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a), done)
		}, []Flow{a}, nil, false},
		{"interrupted, said by an entry", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a), entry(t, multi|intr, b))
			s.datagram(done)
		}, []Flow{a, b}, ErrInterrupted, false},
		{"interrupted, said at the end", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a))
			s.datagram(part(unix.NLMSG_DONE, multi|intr, 1, number(0)))
		}, []Flow{a}, ErrInterrupted, false},
		{"overrun", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a), part(unix.NLMSG_OVERRUN, multi, 1, nil))
		}, []Flow{a}, ErrInterrupted, false},
		{"error at the end", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a))
			s.datagram(part(unix.NLMSG_DONE, multi, 1, number(-int32(unix.ENOMEM))))
		}, []Flow{a}, unix.ENOMEM, false},
		{"refused", match(vip4), func(s *script) {
			s.datagram(part(unix.NLMSG_ERROR, 0, 1, number(-int32(unix.EPERM))))
		}, nil, unix.EPERM, false},
		{"socket fails", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a))
			s.err = unix.ENOBUFS
		}, []Flow{a}, unix.ENOBUFS, false},
		{"message longer than its datagram", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a)[:60])
		}, nil, unix.EBADMSG, false},
		{"kernel that ignores the filter", match(vip4), func(s *script) {
			s.datagram(entry(t, multi, a), entry(t, multi, other))
		}, []Flow{a}, ErrInterrupted, true},
		{"IPv6: the kernel is not asked for the address", match(vip6), func(s *script) {
			s.datagram(entry(t, multi, six), entry(t, multi, other6), done)
		}, []Flow{six}, nil, false},
		{"IPv6: kernel that ignores the filter", match(vip6), func(s *script) {
			s.datagram(entry(t, multi, six), entry(t, multi, flow("[fd00::1]:3", "[fd00::2]:443", "[fd00::2]:443")))
		}, []Flow{six}, ErrInterrupted, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := new(script)
			tt.script(s)
			k := scripted(s)
			var got []Flow
			var err error
			for f, ferr := range k.Flows(t.Context(), []Match{tt.match}) {
				if err = ferr; err == nil {
					got = append(got, f)
				}
			}
			if !errors.Is(err, tt.wantErr) {
				t.Errorf("error %v, want %v", err, tt.wantErr)
			}
			if diff := cmp.Diff(tt.want, got, compareAddrs); diff != "" {
				t.Errorf("flows (-want +got):\n%s", diff)
			}
			if k.ignoresFilter.Load() != tt.ignores {
				t.Errorf("ignoresFilter = %v", !tt.ignores)
			}
		})
	}
}

// TestOldKernel: the first dump finds out that the kernel ignores filters, the
// second one walks once for all matches.
func TestOldKernel(t *testing.T) {
	a, six := flow("10.244.1.1:1", vip4, podA), flow("[fd00::1]:1", vip6, pod6)
	tcp := flow("10.244.1.1:1", vip4, podA)
	tcp.Proto = unix.IPPROTO_TCP
	strange := part(typeNew, multi, 1, []byte{unix.AF_INET, 0, 0, 0, 1, 2, 3})
	whole := func(s *script) {
		s.datagram(strange, entry(t, multi, tcp), entry(t, multi, a))
		s.datagram(entry(t, multi, flow("10.244.1.1:3", "10.96.0.11:53", podA)), entry(t, multi, six))
		s.datagram(part(unix.NLMSG_DONE, multi, 1, number(0)))
	}
	first, second := new(script), new(script)
	whole(first)
	whole(second)
	k := scripted(first, second)
	ms := []Match{match(vip4), match(vip6)}
	for _, err := range k.Flows(t.Context(), ms) {
		if err != nil && !errors.Is(err, ErrInterrupted) {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(sorted([]Flow{a, six}), collect(t, k, ms...), compareAddrs); diff != "" {
		t.Errorf("flows (-want +got):\n%s", diff)
	}
	if n := len(second.sent); n != 1 {
		t.Errorf("%d dumps, want one for all matches", n)
	}
	if got := k.Stats(); got.Dumps != 2 || got.Interrupted != 1 {
		t.Errorf("stats %+v", got)
	}
}

func TestDeleteScripts(t *testing.T) {
	flows := []Flow{flow("10.244.1.1:1", vip4, podA), flow("10.244.1.1:2", vip4, podA), flow("10.244.1.1:3", vip4, podA)}
	failed := func(seq uint32, e unix.Errno) []byte {
		return part(unix.NLMSG_ERROR, 0, seq, number(-int32(e)))
	}
	for _, tt := range []struct {
		name    string
		script  func(s *script)
		want    []bool
		wantErr error
	}{
		{"all", func(s *script) { s.datagram(failed(3, 0)) }, []bool{true, true, true}, nil},
		{"the last is gone", func(s *script) { s.datagram(failed(3, unix.ENOENT)) }, []bool{true, true, false}, nil},
		{"one is gone, one is busy", func(s *script) {
			s.datagram(failed(1, unix.ENOENT))
			s.datagram(failed(2, unix.EBUSY), failed(3, 0))
		}, []bool{false, false, true}, unix.EBUSY},
		{"answers to nobody", func(s *script) {
			s.datagram(failed(0, unix.EIO), failed(99, unix.EIO), failed(3, 0))
		}, []bool{true, true, true}, nil},
		{"socket fails", func(s *script) { s.err = unix.ENOBUFS }, []bool{false, false, false}, unix.ENOBUFS},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := new(script)
			tt.script(s)
			got, err := scripted(s).Delete(t.Context(), flows)
			if !errors.Is(err, tt.wantErr) {
				t.Errorf("error %v, want %v", err, tt.wantErr)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("removed %v, want %v", got, tt.want)
			}
		})
	}
}

// TestDeleteMatchingScripts: the refusals of older kernels are remembered.
func TestDeleteMatchingScripts(t *testing.T) {
	for _, tt := range []struct {
		errno unix.Errno
		want  error
		again bool
	}{
		{0, nil, true},
		{unix.EINVAL, ErrNotSupported, false},
		{unix.EOPNOTSUPP, ErrNotSupported, false},
		{unix.ENOMEM, unix.ENOMEM, true},
	} {
		t.Run(tt.errno.Error(), func(t *testing.T) {
			first, second := new(script), new(script)
			for _, s := range []*script{first, second} {
				s.datagram(part(unix.NLMSG_ERROR, 0, 1, number(-int32(tt.errno))))
			}
			k := scripted(first, second)
			for range 2 {
				if err := k.DeleteMatching(t.Context(), match(vip4, podA)); !errors.Is(err, tt.want) {
					t.Errorf("error %v, want %v", err, tt.want)
				}
			}
			if again := len(second.sent) == 1; again != tt.again {
				t.Errorf("tried again: %v", again)
			}
		})
	}
}

// TestDeleteAlwaysNamesTheTuple: without it, older kernels empty the table.
func TestDeleteAlwaysNamesTheTuple(t *testing.T) {
	s := new(script)
	s.datagram(part(unix.NLMSG_ERROR, 0, 1, number(0)))
	if err := scripted(s).DeleteMatching(t.Context(), match(vip4, podA)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []uint16{ctaTupleOrig, ctaTupleReply, ctaFilter} {
		ad, err := netlink.NewAttributeDecoder(s.sent[0][4:])
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for ad.Next() {
			found = found || ad.Type() == want
		}
		if !found {
			t.Errorf("no attribute %d", want)
		}
	}
}

// TestFilterHasNoIPv6Address: the kernel would take it for its opposite.
func TestFilterHasNoIPv6Address(t *testing.T) {
	for _, tt := range []struct {
		name  string
		match Match
		want  [2]bool // an address of the frontend, of the endpoint
	}{
		{"IPv4", match(vip4, podA), [2]bool{true, true}},
		{"any IPv4 address", match("0.0.0.0:53", podA), [2]bool{false, true}},
		{"IPv6", match(vip6, pod6), [2]bool{false, false}},
		{"any IPv6 address", match("[::]:53", pod6), [2]bool{false, false}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req, err := dumpRequest(tt.match)
			if err != nil {
				t.Fatal(err)
			}
			bad := false
			for i, typ := range []uint16{ctaTupleOrig, ctaTupleReply} {
				tuple := child(req.Data[4:], typ, &bad)
				if got := child(tuple, ctaTupleIP, &bad) != nil; got != tt.want[i] {
					t.Errorf("tuple %d with an address: %v", typ, got)
				}
				flags := child(child(req.Data[4:], ctaFilter, &bad), uint16(i+1), &bad)
				addr := []uint32{filterIPDst, filterIPSrc}[i]
				if got := binary.NativeEndian.Uint32(flags)&addr != 0; got != tt.want[i] {
					t.Errorf("flags of tuple %d compare the address: %v", typ, got)
				}
			}
			if bad {
				t.Error("attributes do not add up")
			}
		})
	}
}

func TestDialFails(t *testing.T) {
	k := scripted()
	if _, err := k.Delete(t.Context(), []Flow{flow("10.244.1.1:1", vip4, podA)}); !errors.Is(err, unix.EMFILE) {
		t.Errorf("Delete: %v", err)
	}
	if err := k.DeleteMatching(t.Context(), match(vip4, podA)); !errors.Is(err, unix.EMFILE) {
		t.Errorf("DeleteMatching: %v", err)
	}
	for _, err := range k.Flows(t.Context(), []Match{match(vip4)}) {
		if !errors.Is(err, unix.EMFILE) {
			t.Errorf("Flows: %v", err)
		}
	}
}

// FuzzMessages: whatever the kernel sends, reading ends, within bounds.
func FuzzMessages(f *testing.F) {
	f.Add(part(unix.NLMSG_DONE, multi, 1, number(0)))
	msg, err := createRequest(flow("10.244.1.1:1", vip4, podA))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(part(typeNew, multi, 1, msg.Data))
	msg6, err := createRequest(flow("[fd00::1]:1", vip6, pod6))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(part(typeNew, multi, 1, msg6.Data))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		err := messages(b, func(h netlink.Header, data []byte) error {
			n += unix.NLMSG_HDRLEN + len(data)
			udpDstPort(data)
			return errno(data)
		})
		if n > len(b) {
			t.Fatalf("read %d of %d bytes: %v", n, len(b), err)
		}
	})
}
