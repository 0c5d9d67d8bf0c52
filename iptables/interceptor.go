package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// checkEvery is how often everything is compared although no notification
	// came: there is none for the legacy variant of iptables.
	checkEvery = 500 * time.Millisecond
	// settle is the least time between two checks that notifications cause: a
	// node whose routes or rules change all the time costs us twenty a second.
	settle = 50 * time.Millisecond
	// handover bounds the wait for the table of a predecessor that was killed
	// a moment ago: the kernel removes it some milliseconds after the process.
	handover = 2 * time.Second
)

// Interceptor keeps an interception in the kernel. Its methods are safe for
// concurrent use.
type Interceptor struct {
	cfg     Config
	prober  prober
	choices *selector
	watcher *watcher

	mu        sync.Mutex // protects all below, and what the kernel has
	slot      *slot      // nil: not started, or closed
	kernel    kernel
	targets   Targets
	withdrawn map[Service]bool
	taking    map[Service]bool // what the kernel was last seen to do
	lastBeat  time.Time
	asking    map[Service]bool // probes under way
	probed    map[Service]error
	foreign   []string
	ledger    *ledger
	stats     Stats
}

// New checks the configuration and touches nothing.
func New(cfg Config) (*Interceptor, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if len(cfg.Probe) < 12 { // the header, RFC 1035 section 4.1.1
		return nil, errors.New("intercept: the probe is no DNS message")
	}
	return &Interceptor{
		cfg:    cfg,
		prober: prober{query: cfg.Probe, mark: cfg.taken()},
		choices: newSelector(map[Backend]func(RuleSet) support{
			NFTables: probeNFT,
			IPTables: func(rs RuleSet) support { return probeXT(runProgram, rs) },
		}),
		targets:   cfg.Targets,
		withdrawn: make(map[Service]bool),
		taking:    make(map[Service]bool),
		asking:    make(map[Service]bool),
		probed:    make(map[Service]error),
		ledger:    newLedger(),
		stats:     Stats{Withdrawals: make(map[string]uint64)},
	}, nil
}

// Start checks what must hold, chooses the backend, takes over what a
// predecessor left and applies the rules. The sockets must be open: see
// Listen. Nothing is taken until the first answer has left, which Run's first
// probe causes.
//
// A *ConfigError says which setting to change; an *AddressError that an
// interface has one of the addresses, perhaps only for now: see AwaitAddresses.
func (i *Interceptor) Start(ctx context.Context) (err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.slot != nil {
		return errors.New("intercept: started already")
	}
	rs := newRuleSet(i.current(), 0, i.withdrawn)
	if err := checkAddresses(rs.routing().addrs); err != nil {
		return err
	}
	if err := rs.routing().check(i.cfg.own()); err != nil {
		return err
	}
	backend, found, err := i.choices.choose(i.cfg.Backend, rs)
	if err != nil {
		return err
	}
	if i.slot, err = claimSlot(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.release())
		}
	}()
	i.stats.Backend, i.stats.Reason = backend, found.reason
	if i.kernel, err = openKernel(backend, found.owner, i.slot.newest); err != nil {
		return err
	}
	if i.watcher, err = watch(map[int][]uint32{
		unix.NETLINK_NETFILTER: {groupNFTables},
		unix.NETLINK_ROUTE:     {groupRule4, groupRule6, groupRoute4, groupRoute6},
	}); err != nil {
		return err
	}
	if err := removeLeftovers(i.slot.number); err != nil {
		return err
	}
	if i.slot.alone() {
		if _, err := rs.routing().prune(); err != nil {
			return err
		}
	}
	return i.firstApply(ctx)
}

// firstApply applies the rules, and waits for a predecessor's table of the
// same name to go.
func (i *Interceptor) firstApply(ctx context.Context) error {
	deadline := time.Now().Add(handover)
	for {
		_, err := i.ensure()
		if err == nil || !errors.Is(err, fs.ErrPermission) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-i.watcher.kick:
		case <-time.After(settle):
		}
	}
}

func openKernel(b Backend, owner bool, inCharge func() bool) (kernel, error) {
	if b == IPTables {
		return newXTKernel(runProgram)
	}
	return newNFTKernel(owner, inCharge)
}

// current is the configuration with the present targets.
func (i *Interceptor) current() Config {
	c := i.cfg
	c.Targets = i.targets
	return c
}

// Run probes, watches and repairs until ctx is done. It returns nil then:
// nothing that it meets is worth to end the process for.
func (i *Interceptor) Run(ctx context.Context) error {
	beat := time.NewTicker(i.cfg.AliveTimeout / 4)
	defer beat.Stop()
	check := time.NewTicker(checkEvery)
	defer check.Stop()
	weigh := time.NewTicker(weighEvery)
	defer weigh.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()

	kick := i.watcher.kick
	var settled <-chan time.Time
	i.beat(ctx, &probes)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-beat.C:
			i.beat(ctx, &probes)
		case <-kick:
			i.check()
			kick, settled = nil, time.After(settle)
		case <-settled:
			kick, settled = i.watcher.kick, nil
		case <-check.C:
			i.check()
		case now := <-weigh.C:
			i.weigh(now)
		}
	}
}

// ensure makes the kernel carry what is wanted. It is called with mu held.
func (i *Interceptor) ensure() (repaired bool, err error) {
	if i.slot == nil {
		return false, ErrClosed
	}
	rs := newRuleSet(i.current(), i.slot.number, i.withdrawn)
	added, foreign, err := rs.routing().ensure()
	i.reportForeign(foreign)
	if err != nil {
		return added > 0, err
	}
	repaired, err = i.kernel.ensure(rs)
	return repaired || added > 0, err
}

// check compares and repairs.
func (i *Interceptor) check() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.slot == nil {
		return
	}
	repaired, err := i.ensure()
	if repaired {
		i.stats.Repairs++
		i.emit(Event{Kind: Repaired})
	}
	if (err == nil) != (i.stats.RepairError == nil) && err != nil {
		i.emit(Event{Kind: RepairFailed, Err: err})
	}
	i.stats.RepairError = err
}

// reportForeign tells of rules that were not there at the last look.
func (i *Interceptor) reportForeign(rules []string) {
	known := make(map[string]bool)
	for _, r := range i.foreign {
		known[r] = true
	}
	for _, r := range rules {
		if !known[r] {
			i.emit(Event{Kind: ForeignRule, Detail: r})
		}
	}
	i.foreign = rules
}

// beat looks which services are alive and probes those that have been silent.
func (i *Interceptor) beat(ctx context.Context, probes *sync.WaitGroup) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.slot == nil {
		return
	}
	left, err := i.kernel.alive()
	if err != nil {
		i.stats.AliveError = err
		return
	}
	i.stats.AliveError = nil
	// A process that was stopped may have answered again before it looks.
	now := time.Now()
	stalled := !i.lastBeat.IsZero() && now.Sub(i.lastBeat) > i.cfg.AliveTimeout
	i.lastBeat = now
	for _, s := range i.targets.services() {
		if i.withdrawn[s] {
			continue
		}
		if stalled {
			i.transition(s, false, ReasonSilent)
		}
		i.transition(s, left[s] > 0, ReasonSilent)
		if left[s] > i.cfg.AliveTimeout*3/4 || i.asking[s] {
			continue
		}
		i.asking[s] = true
		probes.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, i.cfg.AliveTimeout)
			defer cancel()
			err := i.prober.ask(ctx, s)
			i.mu.Lock()
			defer i.mu.Unlock()
			delete(i.asking, s)
			i.probed[s] = err
		})
	}
}

// transition notes that a service is taken, or not any more.
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

// weigh lets clients past that do not reach us.
func (i *Interceptor) weigh(now time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	k, sees := i.kernel.(clientKernel)
	if i.slot == nil || !sees || i.cfg.Received == nil {
		return
	}
	taken, err := k.taken()
	if err != nil {
		i.stats.BypassError = err
		return
	}
	// While another process shares the addresses, what was taken may have
	// arrived there. A service that does not answer a probe either has other
	// troubles than one client.
	judge := i.slot.alone()
	for _, s := range i.targets.services() {
		judge = judge && (i.withdrawn[s] || i.taking[s] && i.probed[s] == nil)
	}
	blocked, returned := i.ledger.weigh(now, judge, taken, i.cfg.Received)
	for _, c := range returned {
		i.emit(Event{Kind: Returned, Client: c})
	}
	i.stats.BypassError = nil
	for c, length := range blocked {
		if err := k.bypass([]Client{c}, length); err != nil {
			i.stats.BypassError = err
			continue
		}
		i.emit(Event{Kind: Bypassed, Client: c, Detail: length.String()})
	}
}

// Apply changes what is intercepted. Services that stay are taken on without
// a gap.
func (i *Interceptor) Apply(t Targets) error {
	if err := t.validate(); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	before := i.targets
	i.targets = t
	if _, err := i.ensure(); err != nil {
		i.targets = before
		return fmt.Errorf("apply interception: %w", err)
	}
	still := make(map[Service]bool)
	for _, s := range t.services() {
		still[s] = true
	}
	for _, s := range before.services() {
		if !still[s] {
			delete(i.withdrawn, s)
			delete(i.taking, s)
			delete(i.probed, s)
		}
	}
	if i.slot.alone() {
		_, err := newRuleSet(i.current(), i.slot.number, i.withdrawn).routing().prune()
		return err
	}
	return nil
}

// Withdraw leaves the selected services to kube-proxy, in one transaction,
// until Restore. Answers to what has been taken still leave as they must. The
// reason is for events and Stats.
func (i *Interceptor) Withdraw(reason string, which func(Service) bool) error {
	return i.arm(which, func(s Service) { i.withdrawn[s] = true }, reason)
}

// Restore takes the selected services again, as soon as an answer has left.
func (i *Interceptor) Restore(which func(Service) bool) error {
	return i.arm(which, func(s Service) { delete(i.withdrawn, s) }, "")
}

func (i *Interceptor) arm(which func(Service) bool, set func(Service), reason string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.targets.services() {
		if which(s) {
			set(s)
		}
	}
	if _, err := i.ensure(); err != nil {
		return err // Run tries again
	}
	for s := range i.withdrawn {
		i.transition(s, false, reason)
	}
	return nil
}

// emit tells of an event, with mu held: so events come in order.
func (i *Interceptor) emit(e Event) {
	if i.cfg.OnEvent != nil {
		i.cfg.OnEvent(e)
	}
}

// Close removes everything but the fallback of link-local addresses, which
// outlives the process. Run must have returned, and the sockets be closed: an
// answer that leaves later would be tracked by the kernel, as the start of a
// flow that keeps its client from kube-proxy's translation for 30 s. Withdraw
// comes first, then the sockets are drained. Closing twice is no error.
func (i *Interceptor) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.release()
}

func (i *Interceptor) release() error {
	if i.slot == nil {
		return nil
	}
	var errs []error
	if i.kernel != nil {
		errs = append(errs, i.kernel.close())
	}
	if i.slot.alone() {
		_, err := routing{}.prune()
		errs = append(errs, err)
	}
	if i.watcher != nil {
		errs = append(errs, i.watcher.close())
	}
	errs = append(errs, i.slot.release())
	i.slot, i.kernel = nil, nil
	for s := range i.taking {
		delete(i.taking, s)
	}
	return errors.Join(errs...)
}
