package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// refuser is a netlink socket on which the kernel refuses everything.
type refuser struct {
	netlink.Socket
	err error
}

func (refuser) Close() error               { return nil }
func (refuser) Send(netlink.Message) error { return nil }

func (r refuser) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) { yield(netlink.Message{}, r.err) }
}

// TestTablesOfKernelWithoutNFTables: there are none, and that is no error, so that
// what the iptables backend has left there is removed.
func TestTablesOfKernelWithoutNFTables(t *testing.T) {
	for _, tt := range []struct {
		name       string
		open, list error
		want       error
	}{
		{"no nfnetlink", unix.EPROTONOSUPPORT, nil, nil},
		{"no nf_tables", nil, unix.EINVAL, nil},
		{"no family inet", nil, unix.EOPNOTSUPP, nil},
		{"no right", nil, unix.EPERM, fs.ErrPermission},
		{"no descriptor", unix.EMFILE, nil, unix.EMFILE},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tables, err := listTables(func() (*ruleset, error) {
				if tt.open != nil {
					return nil, fmt.Errorf("connect to nftables: %w", tt.open)
				}
				return &ruleset{netlink.NewConn(refuser{err: tt.list}, 0)}, nil
			})
			if !errors.Is(err, tt.want) || len(tables) > 0 {
				t.Errorf("%v, %v, want %v", tables, err, tt.want)
			}
		})
	}
}

// withoutIPv6 runs f where the kernel has no IPv6, as after a boot with
// ipv6.disable=1.
func withoutIPv6(t *testing.T, f func()) {
	t.Helper()
	const (
		number, argument = 0, 16                 // struct seccomp_data, include/uapi/linux/seccomp.h
		refuse, allow    = 5 << 16, 0x7fff << 16 // SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
	)
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: number, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SYS_SOCKET, SkipFalse: 3},
		bpf.LoadAbsolute{Off: argument, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipFalse: 1},
		bpf.RetConstant{Val: refuse | uint32(unix.EAFNOSUPPORT)},
		bpf.RetConstant{Val: allow},
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
		if err == nil {
			filter := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(unsafe.SliceData(program)))}
			err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&filter)), 0, 0)
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestRemoveChainsOfOneFamily: what goes wrong with one family keeps nothing of the
// other, and one that the kernel lacks is not asked.
func TestRemoveChainsOfOneFamily(t *testing.T) {
	broken := errors.New("cannot initialize: address family not supported by protocol")
	none := func(int) bool { return false }
	for _, tt := range []struct {
		name  string
		fails string
		in    func(*testing.T, func())
		want  error
		calls []string
	}{
		{"IPv4 fails", saveProgram(0), nil, broken, []string{saveProgram(0), saveProgram(1), restoreProgram(1)}},
		{"IPv6 fails", saveProgram(1), nil, broken, []string{saveProgram(0), restoreProgram(0), saveProgram(1)}},
		{"no IPv6", saveProgram(1), withoutIPv6, nil, []string{saveProgram(0), restoreProgram(0)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var calls []string
			run := func(name, stdin string, _ ...string) (string, error) {
				calls = append(calls, name)
				switch {
				case name == tt.fails:
					return "", broken
				case strings.HasSuffix(name, "-save"):
					return "*raw\n:PREROUTING ACCEPT [0:0]\n:DNSGUARD-QUERY - [0:0]\n-A PREROUTING -j DNSGUARD-QUERY\nCOMMIT\n", nil
				case !strings.Contains(stdin, "-X DNSGUARD-QUERY"):
					t.Errorf("%s was fed:\n%s", name, stdin)
				}
				return "", nil
			}
			removed, err := 0, error(nil)
			remove := func() { removed, err = removeChains(run, none) }
			if tt.in != nil {
				tt.in(t, remove)
			} else {
				remove()
			}
			if removed != 1 || !errors.Is(err, tt.want) || !slices.Equal(calls, tt.calls) {
				t.Errorf("removed %d, %v; called %q, want %q", removed, err, calls, tt.calls)
			}
		})
	}
}
