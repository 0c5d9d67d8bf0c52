package iptables

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fakeKernel lets services live as long as something has renewed them.
type fakeKernel struct {
	mu      sync.Mutex
	timeout time.Duration
	renewed map[Service]time.Time
	err     error
}

func (k *fakeKernel) ensure(RuleSet) (bool, error) { return false, nil }
func (k *fakeKernel) close() error                 { return nil }

func (k *fakeKernel) alive(services []Service) (map[Service]time.Duration, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make(map[Service]time.Duration)
	for _, s := range services {
		if at, ok := k.renewed[s]; ok && time.Since(at) < k.timeout {
			out[s] = k.timeout - time.Since(at)
		}
	}
	return out, k.err
}

// answer is an answer that leaves.
func (k *fakeKernel) answer(s Service) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.renewed[s] = time.Now()
}

// heart is an Interceptor with its pulse on a fake kernel, in virtual time.
type heart struct {
	*Interceptor
	kernel *fakeKernel
	udp    Service

	mu     sync.Mutex
	probes map[Service]int
	events []Event
	deaf   map[Service]bool // services that answer no probe
}

func newHeart(t *testing.T) *heart {
	t.Helper()
	h := &heart{
		kernel: &fakeKernel{timeout: time.Second, renewed: make(map[Service]time.Time)},
		udp:    Service{vip4, UDP}, probes: make(map[Service]int), deaf: make(map[Service]bool),
	}
	cfg := withProbe(clusterIPConfig())
	cfg.Addresses = []netip.AddrPort{vip4}
	cfg.OnEvent = func(e Event) { h.events = append(h.events, e) } // with the Interceptor's mu held
	i, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	i.probe = func(ctx context.Context, s Service) error {
		h.mu.Lock()
		h.probes[s]++
		deaf := h.deaf[s]
		h.mu.Unlock()
		if deaf {
			<-ctx.Done()
			return ctx.Err()
		}
		h.kernel.answer(s)
		return nil
	}
	h.Interceptor = i
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		i.pulse(ctx, h.kernel)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return h
}

// pass lets virtual time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (h *heart) setDeaf(deaf bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deaf[h.udp] = deaf
}

func (h *heart) probed(s Service) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.probes[s]
}

// kinds lists the events of the UDP service.
func (h *heart) kinds() []EventKind {
	h.Interceptor.mu.Lock()
	defer h.Interceptor.mu.Unlock()
	var out []EventKind
	for _, e := range h.events {
		if e.Service == h.udp {
			out = append(out, e.Kind)
		}
	}
	return out
}

func TestPulseProbesTheSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHeart(t)
		pass(10*time.Second + time.Millisecond)
		// The first beat finds nothing alive; then at half the timeout each.
		if n := h.probed(h.udp); n < 19 || n > 22 {
			t.Errorf("%d probes in ten silent seconds, want 2 a second", n)
		}
		before := h.probed(h.udp)
		for range 100 { // traffic
			h.kernel.answer(h.udp)
			pass(100 * time.Millisecond)
		}
		if n := h.probed(h.udp) - before; n > 0 {
			t.Errorf("%d probes beside traffic", n)
		}
		if got := h.kinds(); !slices.Equal(got, []EventKind{Taking}) {
			t.Errorf("events: %v", got)
		}
	})
}

func TestPulseTellsOfSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHeart(t)
		pass(2 * time.Second)
		h.setDeaf(true)
		before := h.probed(h.udp)
		pass(3 * time.Second)
		if diff := cmp.Diff([]EventKind{Taking, Withdrawn}, h.kinds()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		// A probe that waits does not keep the next from being sent.
		if n := h.probed(h.udp) - before; n < 9 {
			t.Errorf("%d probes in three seconds of silence, want one a beat", n)
		}
		st := h.Stats()
		if st.Active[vip4] || st.Withdrawals[ReasonSilent] != 1 || !errors.Is(st.ProbeErrors[h.udp], context.DeadlineExceeded) {
			t.Errorf("stats: %+v", st)
		}
		h.setDeaf(false)
		pass(time.Second)
		if diff := cmp.Diff([]EventKind{Taking, Withdrawn, Taking}, h.kinds()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		// The last probe that failed ended later than the first that was answered.
		if st := h.Stats(); !st.Active[vip4] || st.ProbeErrors[h.udp] != nil {
			t.Errorf("stats: %+v", st)
		}
	})
}

func TestPulseNoticesItsOwnStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHeart(t)
		pass(2 * time.Second)
		// As if the process had been stopped: the kernel let go, and answers
		// that had waited left before the pulse looked.
		h.Interceptor.mu.Lock()
		h.lastBeat = h.lastBeat.Add(-2 * time.Second)
		h.Interceptor.mu.Unlock()
		pass(time.Second)
		if diff := cmp.Diff([]EventKind{Taking, Withdrawn, Taking}, h.kinds()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

func TestPulseWithoutAView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHeart(t)
		pass(2 * time.Second)
		broken := errors.New("no buffer space")
		h.kernel.mu.Lock()
		h.kernel.err = broken
		h.kernel.mu.Unlock()
		pass(2 * time.Second)
		if st := h.Stats(); !errors.Is(st.AliveError, broken) || !st.Active[vip4] {
			t.Errorf("stats: %+v", st)
		}
		if got := h.kinds(); !slices.Equal(got, []EventKind{Taking}) {
			t.Errorf("what is not known was told: %v", got)
		}
	})
}
