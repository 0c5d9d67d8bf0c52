package iptables

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// handover bounds the wait for the table of a predecessor that was killed a
// moment ago: the kernel removes it some milliseconds after the process.
const handover = 2 * time.Second

// Interceptor keeps an interception in the kernel. Its methods are safe for
// concurrent use.
type Interceptor struct {
	cfg     Config
	probe   func(context.Context, Service) error
	choices *selector

	// work is held while the kernel is changed, which may take long: others
	// hold the kernel's own locks. It comes before mu.
	work    sync.Mutex
	slot    *slot // nil: not started, or closed
	kernel  kernel
	watcher *watcher
	ledger  *ledger
	dropped uint64    // at the last weighing
	shared  time.Time // when another process was last seen to live
	stale   bool      // others may have left rules or routes, or we: to be pruned when alone

	// mu is held for moments only, so that the heartbeat never waits.
	mu        sync.Mutex
	targets   Targets
	withdrawn map[Service]string // with the reason
	taking    map[Service]bool   // what the kernel was last seen to do
	lastBeat  time.Time
	probed    map[Service]finding // of the last probe
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
		cfg:   cfg,
		probe: prober{query: cfg.Probe, mark: cfg.taken()}.ask,
		choices: newSelector(map[Backend]func(RuleSet) support{
			NFTables: probeNFT,
			IPTables: func(rs RuleSet) support { return probeXT(runProgram, rs) },
		}),
		targets:   cfg.Targets,
		withdrawn: make(map[Service]string),
		taking:    make(map[Service]bool),
		probed:    make(map[Service]finding),
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
	i.work.Lock()
	defer i.work.Unlock()
	if i.kernel != nil {
		return errors.New("intercept: started already")
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.release())
		}
	}()
	rs := i.ruleSet(0)
	if err := CheckAddresses(rs.routing().addrs); err != nil {
		return err
	}
	if err := rs.routing().check(i.cfg.own()); err != nil {
		return err
	}
	backend, found, err := i.choices.choose(i.cfg.Backend, rs)
	if err != nil {
		return err
	}
	if err := i.claim(); err != nil {
		return err
	}
	i.note(func(s *Stats) { s.Backend, s.Reason = backend, found.reason })
	if i.kernel, err = i.openKernel(backend, found.owner); err != nil {
		return err
	}
	if i.watcher, err = watch(map[int][]uint32{
		unix.NETLINK_NETFILTER: {groupNFTables},
		unix.NETLINK_ROUTE:     {groupRule4, groupRule6, groupRoute4, groupRoute6},
	}); err != nil {
		return err
	}
	if err := removeLeftovers(i.slot.number, backend); err != nil {
		return err
	}
	if err := i.prune(rs); err != nil {
		return err
	}
	return i.firstApply(ctx)
}

// prune removes routing rules and routes of ours that are not wanted, whoever
// added them; while others live, which may want them, it is put off.
func (i *Interceptor) prune(rs RuleSet) error {
	if !i.alone() {
		return nil
	}
	_, err := rs.routing().prune()
	i.stale = err != nil
	return err
}

// Claim tells others that live that this process does, before it opens its
// sockets, as Start does otherwise: what they take may arrive here then, and says
// nothing about clients. Close takes it back.
func (i *Interceptor) Claim() error {
	i.work.Lock()
	defer i.work.Unlock()
	return i.claim()
}

func (i *Interceptor) claim() (err error) {
	if i.slot == nil {
		i.slot, err = claimSlot(i.cfg.Mark)
	}
	return err
}

// alone reports whether no other process lives, and notes when one does.
func (i *Interceptor) alone() bool {
	alone := i.slot.alone()
	if !alone {
		i.shared, i.stale = time.Now(), true
	}
	return alone
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

func (i *Interceptor) openKernel(b Backend, owner bool) (kernel, error) {
	if b == IPTables {
		k, err := newXTKernel(runProgram, i.ruleSet(i.slot.number))
		if err != nil {
			return nil, err // not a nil pointer in an interface
		}
		return k, nil
	}
	k, err := newNFTKernel(i.slot.number, owner, i.slot.newest)
	if err != nil {
		return nil, err
	}
	return k, nil
}

// ruleSet is what the kernel is to carry now.
func (i *Interceptor) ruleSet(slot int) RuleSet {
	i.mu.Lock()
	defer i.mu.Unlock()
	c := i.cfg
	c.Targets = i.targets
	return newRuleSet(c, slot, i.withdrawn)
}

// armed returns the services that are not withdrawn. It is called with mu held.
func (i *Interceptor) armed() []Service {
	return slices.DeleteFunc(i.targets.services(), func(s Service) bool { return has(i.withdrawn, s) })
}

// Run probes, watches and repairs until ctx is done. It returns nil then:
// nothing that it meets is worth to end the process for.
func (i *Interceptor) Run(ctx context.Context) error {
	i.work.Lock()
	kernel, watcher := i.kernel, i.watcher
	i.work.Unlock()
	if kernel == nil {
		return ErrClosed
	}
	var running sync.WaitGroup
	running.Go(func() { i.pulse(ctx, kernel) })
	running.Go(func() { i.keep(ctx, watcher.kick) })
	running.Wait()
	return nil
}

func has[K comparable, V any](m map[K]V, k K) bool {
	_, ok := m[k]
	return ok
}

// note changes the stats.
func (i *Interceptor) note(f func(*Stats)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f(&i.stats)
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
	i.work.Lock()
	defer i.work.Unlock()
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
	if i.kernel != nil && i.slot.alone() {
		_, err := routing{}.prune()
		errs = append(errs, err)
	}
	if i.watcher != nil {
		errs = append(errs, i.watcher.close())
	}
	errs = append(errs, i.slot.release())
	i.slot, i.kernel, i.watcher = nil, nil, nil
	i.mu.Lock()
	defer i.mu.Unlock()
	clear(i.taking)
	return errors.Join(errs...)
}
