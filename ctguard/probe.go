package ctguard

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Prober asks an endpoint whether it is alive, past every rule and
// translation.
type Prober interface {
	// Probe returns nil as soon as the endpoint has answered anything, and an
	// error if it did not before the context's end, or cannot. The error is
	// ErrNotSent if that tells nothing of the endpoint.
	Probe(ctx context.Context, endpoint netip.AddrPort) error
}

// ErrNotSent says that a probe did not leave this machine in time, as without a free
// file descriptor, behind a firewall of its own, or stopped for a while.
var ErrNotSent = errors.New("probe not sent")

const (
	// probeTimeout is the time in which one of two probes has to be answered:
	// many times the round trip within a cluster, and short beside the ten
	// seconds for which kube-proxy leaves flows at a dead endpoint.
	probeTimeout = 300 * time.Millisecond

	// probeAgain is when the second probe follows, if the first is not
	// answered: one lost packet condemns nobody.
	probeAgain = 100 * time.Millisecond

	// probeEvery is the pause between the checks of a terminating endpoint.
	probeEvery = time.Second

	// mostWitnesses is how many others are asked when one is silent.
	mostWitnesses = 4

	// probeJitter spreads the first probes of a fleet to a new endpoint.
	probeJitter = time.Second
)

// follower probes one endpoint for as long as it serves: until it has answered
// once, again from the moment it terminates, and while there is doubt.
type follower struct {
	endpoint    netip.AddrPort
	terminating atomic.Bool
	doubted     atomic.Bool
	wake        chan struct{} // capacity 1: one of these has changed
	cancel      context.CancelFunc
}

// turn tells the follower whether the endpoint terminates.
func (f *follower) turn(terminating bool) {
	if f.terminating.Swap(terminating) != terminating {
		f.poke()
	}
}

// doubt has the endpoint probed until it answers.
func (f *follower) doubt() {
	if !f.doubted.Swap(true) {
		f.poke()
	}
}

func (f *follower) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// court is where a follower's probes lead to.
type court interface {
	// answers is told that the endpoint can be probed.
	answers(ctx context.Context, endpoint netip.AddrPort)

	// heard is told each result: whether the endpoint is believed silent.
	heard(ctx context.Context, endpoint netip.AddrPort, silent bool)

	// othersAnswer tells whether it is the endpoint that is silent, and not our
	// way to all of them that is blocked.
	othersAnswer(ctx context.Context, p Prober, endpoint netip.AddrPort) bool
}

// follow probes until ctx ends, and tells what it has found out. Only an endpoint
// that has answered before can be believed silent, and only while others answer:
// otherwise a network policy may be all that is silent.
func (f *follower) follow(ctx context.Context, p Prober, retry time.Duration, c court) {
	answered := false
	wait := rand.N(probeJitter)
	if f.terminating.Load() {
		wait = 0
	}
	for f.pause(ctx, wait) {
		switch {
		case f.terminating.Load() || answered && f.doubted.Load():
			alive, silent := check(ctx, p, f.endpoint)
			if alive {
				f.doubted.Store(false)
				answered = true
				c.answers(ctx, f.endpoint)
			}
			if alive || silent && answered && c.othersAnswer(ctx, p, f.endpoint) {
				c.heard(ctx, f.endpoint, silent)
			}
			wait = probeEvery
		case !answered:
			if answered, _ = check(ctx, p, f.endpoint); answered {
				c.answers(ctx, f.endpoint)
			}
			wait = retry
		default:
			c.heard(ctx, f.endpoint, false)
			wait = -1
		}
	}
}

// pause waits for d, or without end if d is negative, or for a turn. It tells
// whether to go on.
func (f *follower) pause(ctx context.Context, d time.Duration) bool {
	var due <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-due:
	case <-f.wake:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// check sends up to two probes and tells whether one was answered in time, or
// both were sent and none was. It is over early when both have failed, as when the
// endpoint's host refuses.
func check(ctx context.Context, p Prober, endpoint netip.AddrPort) (alive, silent bool) {
	var probes sync.WaitGroup
	defer probes.Wait()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	results := make(chan error, 2)
	probe := func() { results <- p.Probe(ctx, endpoint) }
	probes.Go(probe)
	second := time.NewTimer(probeAgain)
	defer second.Stop()
	silent = true
	for sent, failed := 1, 0; ; {
		// The probes tell when the time is over: the answer may be there that
		// this goroutine was too late for.
		select {
		case err := <-results:
			if err == nil {
				return true, false
			}
			silent = silent && !errors.Is(err, ErrNotSent)
			if failed++; failed == 2 {
				return false, silent
			}
		case <-second.C:
		}
		if sent == 1 {
			sent = 2
			probes.Go(probe)
		}
	}
}
