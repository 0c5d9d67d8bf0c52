// Package ctguardtest provides a connection tracking table for tests of what
// uses package ctguard, without a kernel. It is kept to the same contract as
// the real one by the tests of package ctguard.
package ctguardtest

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
)

// Requests counts what a [Table] was asked for, so that tests can tell what
// something would cost the kernel.
type Requests struct {
	Dumps          int // walks over the table to read it: one for each match
	Entries        int // entries handed out by them
	Deletes        int // flows to be deleted by tuple
	DeleteMatching int // walks over the table to delete
	Subscribes     int
}

// Table is a connection tracking table in memory. It implements
// [ctguard.Table], [ctguard.Events] and [ctguard.Host], and is safe for
// concurrent use. Its zero value is an empty table.
//
// Entries do not expire and have whatever remaining time they were added with.
type Table struct {
	// OnDelete, if set, is told of each flow that has been removed, without
	// any lock held: what a client's next packet does.
	OnDelete func(ctguard.Flow)

	// DumpTime is how long each walk takes.
	DumpTime time.Duration

	// NoDeleteMatching makes the table one of an older kernel's.
	NoDeleteMatching bool

	mu       sync.Mutex
	flows    map[key]ctguard.Flow
	subs     map[*subscription]bool
	requests Requests
	fail     map[ctguard.Op][]error
	timeouts ctguard.Timeouts
	ipvs     []netip.AddrPort
}

// key is what the kernel knows an entry by: a tuple in its zone.
type key struct {
	src, dst netip.AddrPort
	zone     uint16
}

func replyKey(f ctguard.Flow) key {
	return key{f.Reply.Src, f.Reply.Dst, max(f.Zone, f.Reply.Zone)}
}

func origKey(f ctguard.Flow) key {
	return key{f.Orig.Src, f.Orig.Dst, max(f.Zone, f.Orig.Zone)}
}

// Add makes an entry and reports it to the subscribers. A flow whose tuple is
// there already is refused.
func (t *Table) Add(f ctguard.Flow) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range t.flows {
		if replyKey(o) == replyKey(f) || origKey(o) == origKey(f) {
			return fmt.Errorf("flow %v: an entry exists: %v", f, o)
		}
	}
	t.announce(f)
	return nil
}

// Announce is Add for a great many entries: it does not look for others with
// the same tuple.
func (t *Table) Announce(f ctguard.Flow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.announce(f)
}

// announce makes, with mu held, an entry and reports it.
func (t *Table) announce(f ctguard.Flow) {
	if t.flows == nil {
		t.flows = make(map[key]ctguard.Flow)
	}
	t.flows[replyKey(f)] = f
	for s := range t.subs {
		if slices.Contains(s.ports, f.Orig.Dst.Port()) {
			s.push(f, nil)
		}
	}
}

// Set makes or replaces an entry, without an event: as packets do that change
// its remaining time.
func (t *Table) Set(f ctguard.Flow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.flows == nil {
		t.flows = make(map[key]ctguard.Flow)
	}
	t.flows[replyKey(f)] = f
}

// All are the entries, by original source and destination.
func (t *Table) All() []ctguard.Flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.SortedFunc(maps.Values(t.flows), func(a, b ctguard.Flow) int {
		if c := a.Orig.Src.Compare(b.Orig.Src); c != 0 {
			return c
		}
		return a.Orig.Dst.Compare(b.Orig.Dst)
	})
}

// Requests tells what the table was asked for so far.
func (t *Table) Requests() Requests {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests
}

// Fail makes the next operations of a kind fail, one for each error. A dump
// hands out half of its entries before. For [ctguard.OpEvents], a subscriber
// gets the errors.
func (t *Table) Fail(op ctguard.Op, errs ...error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if op == ctguard.OpEvents {
		for s := range t.subs {
			for _, err := range errs {
				s.push(ctguard.Flow{}, err)
			}
		}
		return
	}
	if t.fail == nil {
		t.fail = make(map[ctguard.Op][]error)
	}
	t.fail[op] = append(t.fail[op], errs...)
}

// failure is, with mu held, the next error that an operation has to return.
func (t *Table) failure(op ctguard.Op) error {
	if errs := t.fail[op]; len(errs) > 0 {
		t.fail[op] = errs[1:]
		return errs[0]
	}
	return nil
}

// SetHost sets what [ctguard.Host] tells.
func (t *Table) SetHost(timeouts ctguard.Timeouts, ipvs ...netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timeouts, t.ipvs = timeouts, ipvs
}

// Flows implements [ctguard.Table].
func (t *Table) Flows(ctx context.Context, matches []ctguard.Match) iter.Seq2[ctguard.Flow, error] {
	return func(yield func(ctguard.Flow, error) bool) {
		for _, m := range matches {
			if t.DumpTime > 0 {
				time.Sleep(t.DumpTime)
			}
			if err := context.Cause(ctx); err != nil {
				yield(ctguard.Flow{}, err)
				return
			}
			found, err := t.walk(m)
			if err != nil {
				found = found[:len(found)/2]
			}
			for _, f := range found {
				if !yield(f, nil) {
					return
				}
			}
			if err != nil {
				yield(ctguard.Flow{}, err)
				return
			}
		}
	}
}

func (t *Table) walk(m ctguard.Match) ([]ctguard.Flow, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.requests.Dumps++
	var found []ctguard.Flow
	for _, f := range t.flows {
		if m.Matches(f) {
			found = append(found, f)
		}
	}
	t.requests.Entries += len(found)
	return found, t.failure(ctguard.OpDump)
}

// Delete implements [ctguard.Table].
func (t *Table) Delete(_ context.Context, flows []ctguard.Flow) ([]bool, error) {
	removed := make([]bool, len(flows))
	var gone []ctguard.Flow
	t.mu.Lock()
	t.requests.Deletes += len(flows)
	err := t.failure(ctguard.OpDelete)
	if err == nil {
		for i, f := range flows {
			k := replyKey(f)
			if o, ok := t.flows[k]; ok {
				delete(t.flows, k)
				removed[i] = true
				gone = append(gone, o)
			}
		}
	}
	t.mu.Unlock()
	t.deleted(gone)
	return removed, err
}

// DeleteMatching implements [ctguard.Table].
func (t *Table) DeleteMatching(_ context.Context, m ctguard.Match) error {
	if !m.Src.IsValid() || !m.Dst.IsValid() || m.Dst.Addr().IsUnspecified() {
		return fmt.Errorf("match %v => %v is too wide to delete by", m.Dst, m.Src)
	}
	var gone []ctguard.Flow
	t.mu.Lock()
	t.requests.DeleteMatching++
	err := t.failure(ctguard.OpDelete)
	if t.NoDeleteMatching || m.Dst.Addr().Is6() {
		err = ctguard.ErrNotSupported
	}
	if err == nil {
		for k, f := range t.flows {
			if m.Matches(f) {
				delete(t.flows, k)
				gone = append(gone, f)
			}
		}
	}
	t.mu.Unlock()
	t.deleted(gone)
	return err
}

func (t *Table) deleted(gone []ctguard.Flow) {
	if t.OnDelete != nil {
		for _, f := range gone {
			t.OnDelete(f)
		}
	}
}

// Timeouts implements [ctguard.Host].
func (t *Table) Timeouts() (ctguard.Timeouts, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timeouts == (ctguard.Timeouts{}) {
		return ctguard.DefaultTimeouts(), t.failure(ctguard.OpHost)
	}
	return t.timeouts, t.failure(ctguard.OpHost)
}

// VirtualServers implements [ctguard.Host].
func (t *Table) VirtualServers() ([]netip.AddrPort, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.failure(ctguard.OpHost); err != nil {
		return nil, err
	}
	return t.ipvs, nil
}

// Subscribe implements [ctguard.Events].
func (t *Table) Subscribe(ports []uint16) (ctguard.Subscription, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.requests.Subscribes++
	if err := t.failure(ctguard.OpSubscribe); err != nil {
		return nil, err
	}
	s := &subscription{table: t, ports: slices.Clone(ports), wake: make(chan struct{}, 1)}
	if t.subs == nil {
		t.subs = make(map[*subscription]bool)
	}
	t.subs[s] = true
	return s, nil
}

type event struct {
	flow ctguard.Flow
	err  error
}

type subscription struct {
	table *Table
	ports []uint16
	wake  chan struct{} // capacity 1: there is something new

	// Guarded by table.mu:
	queue  []event
	closed bool
}

// push adds an event, with the table's mutex held.
func (s *subscription) push(f ctguard.Flow, err error) {
	s.queue = append(s.queue, event{f, err})
	s.poke()
}

func (s *subscription) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *subscription) Next() (ctguard.Flow, error) {
	for {
		s.table.mu.Lock()
		if s.closed {
			s.table.mu.Unlock()
			return ctguard.Flow{}, net.ErrClosed
		}
		if len(s.queue) > 0 {
			e := s.queue[0]
			s.queue = s.queue[1:]
			s.table.mu.Unlock()
			return e.flow, e.err
		}
		s.table.mu.Unlock()
		<-s.wake
	}
}

func (s *subscription) Close() error {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	s.closed = true
	delete(s.table.subs, s)
	s.poke()
	return nil
}
