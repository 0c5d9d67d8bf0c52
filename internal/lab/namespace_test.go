package lab_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// currentNamespace names the calling thread's network namespace.
func currentNamespace() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

func TestDoRunsInsideAndRestores(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	before, err := currentNamespace()
	if err != nil {
		t.Fatal(err)
	}
	var inside string
	if err := n.Do(func() (err error) { inside, err = currentNamespace(); return err }); err != nil {
		t.Fatal(err)
	}
	after, err := currentNamespace()
	if err != nil {
		t.Fatal(err)
	}
	if inside == before || after != before {
		t.Errorf("namespace before %s, inside %s, after %s", before, inside, after)
	}
}

// Many goroutines in two namespaces at once: none may see the other's, and the
// main thread none at all.
func TestDoIsConcurrent(t *testing.T) {
	labtest.CheckLeaks(t)
	spaces := []*lab.Namespace{labtest.NewNamespace(t, "one"), labtest.NewNamespace(t, "two")}
	names := make([]string, len(spaces))
	for i, n := range spaces {
		if err := n.Do(func() (err error) { names[i], err = currentNamespace(); return err }); err != nil {
			t.Fatal(err)
		}
	}
	const goroutines, rounds = 16, 50
	errs := make(chan error, goroutines)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for range rounds {
				err := spaces[g%2].Do(func() error {
					runtime.Gosched()
					if unix.Gettid() == unix.Getpid() {
						return errors.New("on the main thread")
					}
					if got, err := currentNamespace(); err != nil || got != names[g%2] {
						return fmt.Errorf("in %s, want %s: %w", got, names[g%2], err)
					}
					return nil
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

func TestDoReportsGoexit(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("no error from a function that ended its goroutine")
	}
	if err := n.Do(func() error { return nil }); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestDoPassesErrorsOn(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	if err := n.Do(func() error { return os.ErrExist }); !errors.Is(err, os.ErrExist) {
		t.Errorf("got %v", err)
	}
}

// A socket belongs to the namespace where it was made, whatever goroutine uses
// it: the same address and port are free in another namespace, and a datagram
// does not cross.
func TestSocketsStayInTheirNamespace(t *testing.T) {
	labtest.CheckLeaks(t)
	const address = "127.0.0.1:5300"
	var conns []net.PacketConn
	for _, label := range []string{"one", "two"} {
		n := labtest.NewNamespace(t, label)
		c, err := n.ListenPacket(t.Context(), "udp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns = append(conns, c)

		d, err := n.Dial(t.Context(), "udp", address)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Write([]byte(label)); err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []string{"one", "two"} {
		buf := make([]byte, 16)
		if err := conns[i].SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		size, _, err := conns[i].ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(buf[:size]); got != want {
			t.Errorf("namespace %s received %q", want, got)
		}
	}
}

func TestNamesAreNotResolved(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	calls := map[string]func(ctx context.Context, network, address string) error{
		"ListenPacket": func(ctx context.Context, _, address string) error {
			_, err := n.ListenPacket(ctx, "udp", address)
			return err
		},
		"Listen": func(ctx context.Context, network, address string) error {
			_, err := n.Listen(ctx, network, address)
			return err
		},
		"Dial": func(ctx context.Context, network, address string) error {
			_, err := n.Dial(ctx, network, address)
			return err
		},
	}
	for name, call := range calls {
		if err := call(t.Context(), "tcp", "localhost:80"); err == nil {
			t.Errorf("%s resolved localhost", name)
		}
	}
}

func TestSysctl(t *testing.T) {
	labtest.CheckLeaks(t)
	const file = "/proc/sys/net/ipv4/ip_default_ttl"
	n := labtest.NewNamespace(t, "one")
	outside, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Sysctl("net.ipv4.ip_default_ttl", "33"); err != nil {
		t.Fatal(err)
	}
	var inside []byte
	if err := n.Do(func() (err error) { inside, err = os.ReadFile(file); return err }); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(inside)); got != "33" {
		t.Errorf("inside: %s, want 33", got)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(outside) {
		t.Errorf("outside: %s, want %s (%v)", now, outside, err)
	}
	for _, key := range []string{"kernel.pid_max", "net/../kernel/pid_max", "vm.swappiness"} {
		if err := n.Sysctl(key, "1"); err == nil {
			t.Errorf("%s: no error, although it belongs to the whole machine", key)
		}
	}
}

func TestClosedNamespace(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	for range 2 {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Do(func() error { return nil }); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("Do: %v", err)
	}
	if _, err := n.Dial(t.Context(), "udp", "127.0.0.1:53"); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("Dial: %v", err)
	}
	if _, err := n.Start(lab.Command{Path: "/proc/self/exe"}); !errors.Is(err, lab.ErrClosed) {
		t.Errorf("Start: %v", err)
	}
}
