package resolver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// eagerClient is a client outside of the runtime's poller. Where it has a processor of
// its own, it has an answer the moment it is there, and asks again while the reader that
// gave it is on its way to wait.
type eagerClient struct {
	t     testing.TB
	fd    int
	spins int
	query []byte
	buf   [512]byte
}

func newEagerClient(t testing.TB, to netip.AddrPort, name string, spins int) *eagerClient {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	c := &eagerClient{t: t, fd: fd, spins: spins}
	if c.query, err = query(name, dns.TypeA).Pack(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	// Far more than a busy machine takes: what was forgotten never comes.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
		t.Fatal(err)
	}
	return c
}

// send asks n times, with a pause before each.
func (c *eagerClient) send(dice *rand.Rand, n int) {
	for range n {
		for pause := dice.IntN(4) * dice.IntN(4000); pause > 0; pause-- {
			c.buf[0]++
		}
		if _, err := unix.Write(c.fd, c.query); err != nil {
			c.t.Error(err)
		}
	}
}

// receive takes n answers, and reports whether they came.
func (c *eagerClient) receive(n int) bool {
	for spins := c.spins; n > 0; spins-- {
		flags := 0
		if spins > 0 {
			flags = unix.MSG_DONTWAIT
		}
		switch _, _, err := unix.Recvfrom(c.fd, c.buf[:], flags); {
		case err == nil:
			n, spins = n-1, c.spins
		case spins <= 0 && !errors.Is(err, unix.EINTR):
			c.t.Errorf("%d answers have not come: %v", n, err)
			return false
		}
	}
	return true
}

// TestNoWakeUpIsLost: a reader that goes on to wait sees what came meanwhile. Whoever
// waits for an answer here sends nothing before it has come: nothing else would wake a
// reader that has forgotten a datagram. With processors to spare, a thread waits in the
// poller while the reader serves, and takes note of it for the reader.
func TestNoWakeUpIsLost(t *testing.T) {
	const each = 200 * time.Millisecond
	r := newTestResolver(t, &fakeForwarder{answer: addressOf(t, 3600)})
	newClient(t, r, "10.0.0.1", UDP).lookup("hit.example.com.")
	for i, tt := range []struct{ procs, readers, clients int }{{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {1, 2, 3}, {4, 2, 3}} {
		t.Run(fmt.Sprintf("procs=%d,readers=%d,clients=%d", tt.procs, tt.readers, tt.clients), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(tt.procs))
			ep, err := Listen(t.Context(), netip.MustParseAddrPort(fmt.Sprintf("127.83.5.%d:0", i+1)), ListenOptions{Readers: tt.readers})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Serve(ep); err != nil {
				t.Fatal(err)
			}
			spins := 0
			if tt.procs > 2 {
				spins = 500
			}
			var asking sync.WaitGroup
			for k := range tt.clients {
				c := newEagerClient(t, ep.Addr, "hit.example.com.", spins)
				dice := rand.New(rand.NewPCG(uint64(i), uint64(k))) //nolint:gosec // not negative, and no secret
				asking.Go(func() {
					for start := time.Now(); time.Since(start) < each; {
						n := 1 + dice.IntN(3)
						c.send(dice, n)
						if !c.receive(n) {
							return
						}
					}
				})
			}
			asking.Wait()
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			if err := r.Remove(ctx, ep); err != nil {
				t.Error(err)
			}
		})
	}
}
