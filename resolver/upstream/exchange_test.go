package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func TestQueryOnTheWire(t *testing.T) {
	for name, tt := range map[string]struct {
		do, cd bool
	}{"plain": {}, "do": {do: true}, "cd": {cd: true}, "both": {do: true, cd: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(0))
				f := n.forwarder(Config{})
				q := query("www.example.")
				q.DO, q.CD = tt.do, tt.cd
				if _, err := f.Exchange(t.Context(), q); err != nil {
					t.Fatal(err)
				}
				got := n.queries()[0].Msg
				want := new(dns.Msg)
				want.Id = got.Id
				want.RecursionDesired = true
				want.AuthenticatedData = true
				want.CheckingDisabled = tt.cd
				want.Question = []dns.Question{{Name: "www.example.", Qtype: dns.TypeA, Qclass: dns.ClassINET}}
				want.SetEdns0(1232, tt.do)
				if diff := cmp.Diff(want.String(), got.String()); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestExchangeContext(t *testing.T) {
	for name, tt := range map[string]struct {
		context func(context.Context) (context.Context, context.CancelFunc)
		reason  Reason
		cause   error
		after   time.Duration
	}{
		"canceled before": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				cancel()
				return ctx, cancel
			}, Canceled, context.Canceled, 0,
		},
		"canceled while waiting": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(100*ms, cancel)
				return ctx, cancel
			}, Canceled, context.Canceled, 100 * ms,
		},
		"deadline": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 300*ms)
			}, Timeout, context.DeadlineExceeded, 300 * ms,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, blackHole)
				f := n.forwarder(Config{Budget: usual})
				ctx, cancel := tt.context(t.Context())
				defer cancel()
				start := time.Now()
				_, err := f.Exchange(ctx, query("www.example."))
				var e *Error
				if !errors.As(err, &e) || e.Reason != tt.reason || !errors.Is(err, tt.cause) {
					t.Errorf("error %v, want reason %v and cause %v", err, tt.reason, tt.cause)
				}
				if sent := len(n.queries()) > 0; sent != (tt.after > 0) {
					t.Errorf("sent a query: %v", sent)
				}
				if after := time.Since(start); after != tt.after {
					t.Errorf("returned after %v, want %v", after, tt.after)
				}
				// A late answer must find nobody.
				if _, err := f.Exchange(t.Context(), query("other.example.")); err == nil {
					t.Error("a black hole answered")
				}
			})
		})
	}
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, blackHole)
		f := n.forwarder(Config{Budget: usual})
		done := make(chan error)
		go func() {
			_, err := f.Exchange(t.Context(), query("www.example."))
			done <- err
		}()
		synctest.Wait()
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		var e *Error
		if err := <-done; !errors.As(err, &e) || e.Reason != Closed {
			t.Errorf("exchange in flight ended with %v, want reason closed", err)
		}
		if _, err := f.Exchange(t.Context(), query("www.example.")); !errors.As(err, &e) || e.Reason != Closed {
			t.Errorf("exchange after Close ended with %v, want reason closed", err)
		}
		if err := f.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// A dial may block for as long as a TCP handshake does.
func TestSlowDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(0))
		n.dialing = func(network string, _ netip.AddrPort) error {
			if network == "tcp" {
				time.Sleep(40 * ms)
			}
			return nil
		}
		f := n.forwarder(Config{Routes: []Route{{Zones: []string{"."}, Protocol: TCPOnly}}})
		start := time.Now()
		results := make(chan error, 20)
		for range cap(results) {
			go func() {
				_, err := f.Exchange(t.Context(), query("www.example."))
				results <- err
			}()
		}
		for range cap(results) {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if after := time.Since(start); after != 40*ms {
			t.Errorf("took %v, want one handshake", after)
		}
		if st := f.Stats().Paths[TCP]; st.Opened != 1 || st.Queries != 20 {
			t.Errorf("%d connections for %d queries, want 1 for 20", st.Opened, st.Queries)
		}
	})
}

func TestFailedDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(0), healthy(0))
		n.dialing = func(_ string, s netip.AddrPort) error {
			if s == addr(1) {
				return &net.OpError{Op: "dial", Net: "udp", Err: syscall.ENETUNREACH}
			}
			return nil
		}
		f := n.forwarder(Config{})
		start := time.Now()
		ans, err := f.Exchange(t.Context(), query("www.example."))
		if err != nil || ans.Server != addr(2) || time.Since(start) != 0 {
			t.Errorf("answer of %v after %v, error %v; want the second server's at once", ans.Server, time.Since(start), err)
		}
		n.become(addr(2), refusing)
		_, err = f.Exchange(t.Context(), query("www.example."))
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error %v does not tell the cause", err)
		}
	})
}

func TestWriteErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		protocol Protocol
		sockets  int // that fail
		err      error
		after    time.Duration
		reason   string // of the error, if there is no answer
	}{
		"a rule drops it: lost like any packet": {UDPOnly, 1, syscall.EPERM, 250 * ms, ""},
		"no room: lost like any packet":         {UDPOnly, 1, syscall.ENOBUFS, 250 * ms, ""},
		"nobody listens there":                  {UDPOnly, 1, syscall.ECONNREFUSED, 0, ""},
		"a local firewall":                      {UDPOnly, 100, syscall.EPERM, 1500 * ms, "local"},
		"a local firewall, any protocol":        {Auto, 100, syscall.EPERM, 1500 * ms, "local"},
		"a stalled connection":                  {TCPOnly, 1, os.ErrDeadlineExceeded, 0, ""},
		"all connections stall":                 {TCPOnly, 100, os.ErrDeadlineExceeded, 0, "network"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, healthy(0))
				n.writing = func(c *fakeConn) error {
					if c.number < tt.sockets {
						return tt.err
					}
					return nil
				}
				f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: tt.protocol}}})
				start := time.Now()
				_, err := f.Exchange(t.Context(), query("www.example."))
				reason := ""
				if e := (*Error)(nil); errors.As(err, &e) {
					reason = e.Reason.String()
				}
				if after := time.Since(start); reason != tt.reason || after != tt.after {
					t.Errorf("error %v after %v, want reason %q after %v", err, after, tt.reason, tt.after)
				}
			})
		})
	}
}

// Answers that come in the very moment in which nobody waits any longer must
// not reach the exchange that uses the same memory next.
func TestAnswersAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(100*ms))
		f := n.forwarder(Config{Timeouts: Timeouts{Hedge: time.Second, Retry: time.Second, Total: 100 * ms}})
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				for j := range 50 {
					q := query(fmt.Sprintf("n%d.of%d.example.", j, i))
					if ans, err := f.Exchange(t.Context(), q); err == nil {
						checkAnswer(t, q, ans)
					}
				}
			})
		}
		wg.Wait()
		if st := f.Stats().Paths[UDP]; st.InFlight != 0 {
			t.Errorf("%d questions still in flight", st.InFlight)
		}
	})
}

// TestWaited: what the client has waited before is part of its time, but a
// question always has two thirds of it.
func TestWaited(t *testing.T) {
	for waited, want := range map[time.Duration]time.Duration{
		0: 1500 * ms, 200 * ms: 1300 * ms, 500 * ms: 1000 * ms, time.Hour: 1000 * ms,
	} {
		t.Run(waited.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, func(*fakeQuery) {})
				f := n.forwarder(Config{})
				q := query("example.com.")
				q.Waited = waited
				start := time.Now()
				if _, err := f.Exchange(t.Context(), q); err == nil {
					t.Fatal("a silent server answers")
				}
				if took := time.Since(start); took != want {
					t.Errorf("took %v, want %v", took, want)
				}
			})
		})
	}
}
