package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// Config says what is watched, and who is told.
type Config struct {
	// Source is an [API] or a [File].
	Source Source

	// Services are guarded: they and their EndpointSlices are watched.
	Services []Name

	// DNSService is the cluster's DNS Service, or the zero Name.
	DNSService Name

	// Pods says that this node's Pods are watched, which needs NodeName.
	Pods     bool
	NodeName string

	// Namespaces says that the Namespaces are watched for the annotations
	// that matter to their pods.
	Namespaces bool

	// ListOf makes a pod's search list ([search.Policy.ListOf]). Without it
	// there are no lists.
	ListOf func(search.Pod) *search.List

	// NodeAddrs returns the node's own addresses, or none if they cannot be had
	// just now: then those it returned last stay in force. It is called only
	// while a guarded Service has node ports, at each change and now and then.
	NodeAddrs func() []netip.Addr

	// OnChange takes each new state. It is never called twice at the same
	// time, nor after Run has returned. What happens while it runs is one
	// change to the next call.
	OnChange func(*State)

	// OnProblem is told when a watch does not get on, and, with a nil Err,
	// when it does again, under the same conditions.
	OnProblem func(Problem)
}

// Problem is what keeps a watch from getting on. What it has brought before
// stays in force.
type Problem struct {
	Watch string // as in [WatchStats]
	Err   error
}

// Source is where objects come from.
type Source interface {
	// attach makes the watches that the feeds need and returns what keeps
	// them up to date until its context ends.
	attach(*feeds) (run func(context.Context))
}

// nodeAddrsInterval is the time after which the node's addresses are asked for
// again. Nothing tells when they change; flows to node ports are then a sweep
// of the guard late, not wrong.
const nodeAddrsInterval = 30 * time.Second

// Watcher follows a source. [Watcher.Run] does the work; its other methods are
// safe for concurrent use at any time.
type Watcher struct {
	cfg   Config
	feeds *feeds
	run   func(context.Context)

	nodeAddrs []netip.Addr // the last there were; Run's alone

	listOf atomic.Pointer[func(search.Pod) *search.List]
	state  atomic.Pointer[State]
}

// New makes a watcher. It reads nothing before [Watcher.Run].
func New(c Config) (*Watcher, error) {
	c.Services = slices.Clone(c.Services)
	slices.SortFunc(c.Services, Name.compare)
	c.Services = slices.Compact(c.Services)
	for _, n := range append(slices.Clone(c.Services), c.DNSService) {
		if (n.Namespace == "" || n.Name == "") && n != (Name{}) {
			return nil, fmt.Errorf("watch service %q: namespace or name is missing", n)
		}
	}
	switch {
	case c.Source == nil:
		return nil, errors.New("watch the cluster: no source")
	case c.Pods && c.NodeName == "":
		return nil, errors.New("watch this node's pods: the node's name is not known")
	}
	w := &Watcher{cfg: c, feeds: newFeeds(c)}
	w.run = c.Source.attach(w.feeds)
	w.listOf.Store(&c.ListOf)
	w.state.Store(new(State))
	return w, nil
}

// Run watches until ctx ends. It must be called once. It returns when nothing
// of it is running any more.
func (w *Watcher) Run(ctx context.Context) {
	var source sync.WaitGroup
	defer source.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	source.Go(func() { w.run(ctx) })

	ticker := time.NewTicker(nodeAddrsInterval)
	defer ticker.Stop()
	reported := make(map[*watchState]error)
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.feeds.changed:
			if w.moves() {
				settle(ctx)
			}
		case <-ticker.C:
		}
		if ctx.Err() == nil {
			w.tell(reported)
		}
	}
}

// settleTime is how long an endpoint may be missing while the controller moves it
// from one slice to another, which takes two writes. It is half of what the guard
// has to delete the flows of one that has really gone, and which it has only then:
// with all endpoints in one slice, and for those that have terminated before,
// nobody waits.
const settleTime = 50 * time.Millisecond

func settle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	<-ctx.Done()
}

// moves tells whether an endpoint is missing that may only be on its way from one
// slice to another.
func (w *Watcher) moves() bool {
	last := w.state.Load().Guard
	if last == nil {
		return false
	}
	w.feeds.mu.Lock()
	defer w.feeds.mu.Unlock()
	for _, svc := range last.Services {
		for name, feed := range w.feeds.slices {
			if name.String() == svc.Name && misses(feed.objects, svc) {
				return true
			}
		}
	}
	return false
}

// misses tells whether the slices lack an endpoint that served and did not
// terminate, while there are several with endpoints of its family.
func misses(in map[Name]slice, svc ctguard.Service) bool {
	there := map[netip.AddrPort]bool{}
	of := map[bool]int{} // slices by whether they are of IPv4
	for _, s := range in {
		families := map[bool]bool{}
		for _, es := range s {
			for _, e := range es {
				there[e.Addr] = true
				families[e.Addr.Addr().Is4()] = true
			}
		}
		for f := range families {
			of[f]++
		}
	}
	for _, p := range svc.Ports {
		for _, e := range p.Endpoints {
			if e.Serving && !e.Terminating && !there[e.Addr] && of[e.Addr.Addr().Is4()] > 1 {
				return true
			}
		}
	}
	return false
}

// tell tells what is new.
func (w *Watcher) tell(reported map[*watchState]error) {
	var problems []Problem
	w.feeds.mu.Lock()
	for _, watch := range w.feeds.watches {
		if text(watch.err) != text(reported[watch]) {
			reported[watch] = watch.err
			problems = append(problems, Problem{Watch: watch.name, Err: watch.err})
		}
	}
	next := w.feeds.state(w.cfg, *w.listOf.Load())
	w.feeds.mu.Unlock()
	w.addNodeAddrs(next.Guard)

	state, same := next.since(w.state.Load())
	if !same {
		w.state.Store(state)
		if w.cfg.OnChange != nil {
			w.cfg.OnChange(state)
		}
	}
	for _, p := range problems {
		if w.cfg.OnProblem != nil {
			w.cfg.OnProblem(p)
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// State returns the latest state. Before anything is known it has no parts.
func (w *Watcher) State() *State { return w.state.Load() }

// Stats tells how fresh the state is.
func (w *Watcher) Stats() Stats { return w.feeds.stats() }

// SetListOf replaces [Config].ListOf: all lists are made anew.
func (w *Watcher) SetListOf(listOf func(search.Pod) *search.List) {
	w.listOf.Store(&listOf)
	w.feeds.kick()
}
