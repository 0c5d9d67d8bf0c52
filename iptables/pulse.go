package iptables

import (
	"context"
	"sync"
	"time"
)

// beatsPerTimeout is how often in AliveTimeout the services are looked after.
// At every second beat one without traffic is probed (its last answer left a
// little after a beat, so it is a little less than two beats old); if that
// probe is lost, the next beat's still comes in time.
const beatsPerTimeout = 4

// fresh is how much of AliveTimeout must be left for a service not to be
// probed: two and a half beats.
func (i *Interceptor) fresh() time.Duration { return i.cfg.AliveTimeout * 5 / 8 }

// pulse looks after the services until ctx is done. Nothing that it does waits
// for a lock that somebody may hold for long: the kernel's, or ours.
func (i *Interceptor) pulse(ctx context.Context, k kernel) {
	beat := time.NewTicker(i.cfg.AliveTimeout / beatsPerTimeout)
	defer beat.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		i.beat(ctx, k, &probes)
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
	}
}

// beat looks which services are alive and probes those that have been silent.
func (i *Interceptor) beat(ctx context.Context, k kernel, probes *sync.WaitGroup) {
	i.mu.Lock()
	armed := i.armed()
	i.mu.Unlock()
	left, err := k.alive(armed)

	i.mu.Lock()
	defer i.mu.Unlock()
	i.stats.AliveError = err
	if err != nil {
		return
	}
	// A process that was stopped may have answered again before it looks.
	now := time.Now()
	stalled := !i.lastBeat.IsZero() && now.Sub(i.lastBeat) > i.cfg.AliveTimeout
	i.lastBeat = now
	for _, s := range armed {
		if has(i.withdrawn, s) { // meanwhile
			continue
		}
		if stalled {
			i.transition(s, false, ReasonSilent)
		}
		i.transition(s, left[s] > 0, ReasonSilent)
		if left[s] <= i.fresh() {
			probes.Go(func() { i.ask(ctx, s, now) })
		}
	}
}

// finding is what became of a probe.
type finding struct {
	sent time.Time
	err  error
}

// ask probes one service. An earlier probe may still wait for its answer; what
// it finds out then does not count any more.
func (i *Interceptor) ask(ctx context.Context, s Service, sent time.Time) {
	ctx, cancel := context.WithTimeout(ctx, i.cfg.AliveTimeout)
	defer cancel()
	err := i.probe(ctx, s)
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.probed[s].sent.Before(sent) {
		i.probed[s] = finding{sent: sent, err: err}
	}
}

// transition notes that a service is taken, or not any more. It is called with
// mu held.
func (i *Interceptor) transition(s Service, taking bool, reason string) {
	if i.taking[s] == taking {
		return
	}
	i.taking[s] = taking
	if taking {
		i.emit(Event{Kind: Taking, Service: s})
		return
	}
	i.stats.Withdrawals[reason]++
	i.emit(Event{Kind: Withdrawn, Service: s, Reason: reason})
}
