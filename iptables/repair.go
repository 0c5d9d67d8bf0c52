package iptables

import (
	"context"
	"errors"
	"slices"
	"time"
)

const (
	// checkEvery is how often everything is compared although no notification
	// came: there is none for the legacy variant of iptables.
	checkEvery = 500 * time.Millisecond
	// settle is the least time between two checks that notifications cause: a
	// node whose routes or rules change all the time costs us twenty a second.
	settle = 50 * time.Millisecond
)

// keep compares and repairs, and weighs clients.
func (i *Interceptor) keep(ctx context.Context, kick <-chan struct{}) {
	check := time.NewTicker(checkEvery)
	defer check.Stop()
	weigh := time.NewTicker(weighEvery)
	defer weigh.Stop()
	kicked := kick
	var settled <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-kicked:
			i.check()
			kicked, settled = nil, time.After(settle)
		case <-settled:
			kicked, settled = kick, nil
		case <-check.C:
			i.check()
		case now := <-weigh.C:
			i.weigh(now)
		}
	}
}

// ensure makes the kernel carry what is wanted. It is called with work held. What
// the routing lacks (of IPv6, where somebody has disabled that) keeps no rule from
// the kernel, of the other family or to withdraw: packets are only taken to where
// an answer has come from.
func (i *Interceptor) ensure() (repaired bool, err error) {
	if i.kernel == nil {
		return false, ErrClosed
	}
	added, err := i.ensureRouting()
	repaired, rulesErr := i.ensureRules()
	return repaired || added > 0, errors.Join(err, rulesErr)
}

func (i *Interceptor) ensureRouting() (added int, err error) {
	added, foreign, err := i.ruleSet(i.slot.number).routing().ensure()
	i.reportForeign(foreign.rules)
	i.reportRemoved(foreign.routes)
	return added, err
}

// ensureRules is what ensure does beside the routing, and all that it takes to
// withdraw.
func (i *Interceptor) ensureRules() (repaired bool, err error) {
	if i.kernel == nil {
		return false, ErrClosed
	}
	repaired, err = i.kernel.ensure(i.ruleSet(i.slot.number))
	if err == nil {
		i.mu.Lock()
		defer i.mu.Unlock()
		for s, reason := range i.withdrawn {
			i.transition(s, false, reason)
		}
	}
	return repaired, err
}

// check compares and repairs.
func (i *Interceptor) check() {
	i.work.Lock()
	defer i.work.Unlock()
	if i.kernel == nil {
		return
	}
	repaired, err := i.ensure()
	if i.alone() && i.stale && err == nil {
		err = i.prune(i.ruleSet(i.slot.number))
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if repaired {
		i.stats.Repairs++
		i.emit(Event{Kind: Repaired})
	}
	if err != nil && i.stats.RepairError == nil {
		i.emit(Event{Kind: RepairFailed, Err: err})
	}
	i.stats.RepairError = err
}

// reportForeign tells of rules that were not there at the last look.
func (i *Interceptor) reportForeign(rules []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, r := range rules {
		if !slices.Contains(i.stats.ForeignRules, r) {
			i.emit(Event{Kind: ForeignRule, Detail: r})
		}
	}
	i.stats.ForeignRules = rules
}

// reportRemoved tells of routes that were in the place of ours.
func (i *Interceptor) reportRemoved(routes []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, r := range routes {
		i.emit(Event{Kind: ForeignRoute, Detail: r})
	}
}

// weigh lets clients past that do not reach us.
func (i *Interceptor) weigh(now time.Time) {
	i.work.Lock()
	defer i.work.Unlock()
	k, sees := i.kernel.(clientKernel)
	if i.slot == nil || !sees || i.cfg.Received == nil {
		return
	}
	taken, err := k.taken()
	if err != nil {
		i.note(func(s *Stats) { s.BypassError = err })
		return
	}
	// While another process shares the addresses, what was taken may have
	// arrived there, or may still be looked at after its end. A service that does
	// not answer a probe either, or has more to read than its sockets hold, has
	// other troubles than one client.
	judge := i.alone() && time.Since(i.shared) > sharedFor && i.healthy()
	if i.cfg.Dropped != nil {
		dropped := i.cfg.Dropped()
		judge = judge && dropped == i.dropped
		i.dropped = dropped
	}
	blocked, returned := i.ledger.weigh(now, judge, taken, i.cfg.Received)
	if len(blocked) > 0 {
		if err = k.bypass(blocked); err == nil {
			_, err = i.ensureRules()
		}
		if err != nil {
			i.ledger.undo(blocked)
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.stats.BypassError, i.stats.Bypassed = err, i.ledger.bypassed()
	for _, c := range returned {
		i.emit(Event{Kind: Returned, Client: c})
	}
	if err != nil {
		return
	}
	for c, length := range blocked {
		i.emit(Event{Kind: Bypassed, Client: c, Detail: length.String()})
	}
}

// healthy reports whether every service that is not withdrawn is taken and
// answers its probes.
func (i *Interceptor) healthy() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return !slices.ContainsFunc(i.armed(), func(s Service) bool { return !i.taking[s] || i.probed[s].err != nil })
}
