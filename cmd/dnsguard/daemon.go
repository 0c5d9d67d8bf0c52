package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// drainTimeout is how long a leaving daemon waits for answers: an upstream's
// total deadline and some.
const drainTimeout = 3 * time.Second

// daemon is a running dnsguard: the parts that live as long as the process, and
// those that a reload replaces.
type daemon struct {
	log        *slog.Logger
	level      *slog.LevelVar
	started    time.Time
	conditions *conditions
	registry   *prometheus.Registry
	cache      *cache.Cache
	resolver   *resolver.Resolver
	relisten   chan struct{} // capacity 1: the endpoints changed
	heard      chan struct{} // closed when an upstream has answered
	reloaded   chan struct{} // capacity 1: other upstreams may be in use
	leave      func()        // ends the process in order

	configWaits atomic.Bool // the latest configuration needs a restart

	// What is known of the cluster; following and guarding are nil where they
	// are not wanted. A reload replaces them.
	following      atomic.Pointer[following]
	nodeName       atomic.Pointer[string] // whose pods are watched
	nodeSeen       atomic.Bool            // pods of this very node have been told of
	nodeInDoubt    atomic.Bool            // no pods, or not this node's
	podsWatched    atomic.Bool            // by an API server, which may not have been heard yet
	cluster        atomic.Pointer[kube.State]
	clusterChanged chan struct{} // capacity 1
	serviceChanged chan struct{} // capacity 1: the DNS Service's addresses
	guarding       atomic.Pointer[guarding]
	guardMu        sync.Mutex    // held while guarding gets what cluster says
	refollows      atomic.Bool   // following has a predecessor, whose word stays in force
	retiredSockets atomic.Uint64 // of ours, since the guard deleted their flows

	// reloads and closing forwarders; waited for at the end.
	background sync.WaitGroup

	mu        sync.Mutex
	cfg       *config.Config
	forwarder *upstream.Forwarder   // nil: the addresses of the DNS Service are waited for
	service   []netip.Addr          // of the cluster's DNS Service, as forwarder has them
	leaving   []*upstream.Forwarder // replaced by reloads, but flights are still out
	retired   upstream.Stats        // of those that are closed
	endpoints map[netip.AddrPort]*resolver.Endpoint
	reloads   map[string]uint64     // by result
	icp       *iptables.Interceptor // nil: nothing is intercepted (yet)
}

// starting is the condition until all others are there: pages are served before.
const starting = "start"

// newDaemon makes the parts and opens the sockets, but serves nothing yet.
func newDaemon(ctx context.Context, cfg *config.Config, log *slog.Logger, level *slog.LevelVar) (*daemon, error) {
	d := &daemon{
		log: log, level: level, started: time.Now(), cfg: cfg,
		relisten: make(chan struct{}, 1), clusterChanged: make(chan struct{}, 1), heard: make(chan struct{}),
		reloaded:       make(chan struct{}, 1),
		serviceChanged: make(chan struct{}, 1), leave: func() {},
		endpoints: map[netip.AddrPort]*resolver.Endpoint{},
		reloads:   map[string]uint64{"success": 0, "failure": 0},
	}
	d.conditions = newConditions(func(ready bool, reasons []string) {
		if ready {
			log.Info("ready")
		} else {
			log.Warn("not ready", "reasons", reasons)
		}
	})
	d.conditions.notReady(starting, "not all parts are at work yet")
	d.registry = newRegistry(d)
	if err := d.makeParts(ctx, cfg); err != nil {
		return nil, errors.Join(err, d.undo())
	}
	return d, nil
}

// makeParts makes what undo takes back.
func (d *daemon) makeParts(ctx context.Context, cfg *config.Config) error {
	settings, err := d.resolverSettings(cfg)
	if err != nil {
		return err
	}
	if d.cache, err = cache.New(cacheConfig(cfg)); err != nil {
		return err
	}
	guard, err := d.newGuarding(cfg)
	if err != nil {
		return err
	}
	d.guarding.Store(guard)
	watcher, err := d.newWatcher(cfg, settings.Search.Policy)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	d.follow(ctx, watcher)
	forwarder, service, err := d.newForwarder(cfg)
	if err != nil && !isServiceUnknown(err) {
		return err
	}
	d.mu.Lock() // the cluster is followed already
	d.forwarder, d.service = forwarder, service
	d.mu.Unlock()
	if d.resolver, err = resolver.New(resolver.Config{Cache: d.cache, Forwarder: asked(forwarder), Settings: settings}); err != nil {
		return err
	}
	if cfg.Intercept.Mode == config.InterceptNone {
		d.endpoints, err = d.openEndpoints(ctx, cfg, cfg.Listen, forwarder != nil)
	}
	return err
}

// undo ends what lives on its own.
func (d *daemon) undo() error {
	d.following.Load().end()
	errs := []error{d.guarding.Load().close()}
	d.background.Wait()
	if f := d.upstream(); f != nil {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// openEndpoints opens sockets on all addresses, or none. If they are not to stay
// open, they only could be: a client is better off with nobody there, and a port
// that tells it so, than with one who knows nobody to ask.
func (d *daemon) openEndpoints(ctx context.Context, cfg *config.Config, addrs []netip.AddrPort, stay bool) (map[netip.AddrPort]*resolver.Endpoint, error) {
	open := map[netip.AddrPort]*resolver.Endpoint{}
	var errs []error
	for _, addr := range addrs {
		ep, err := resolver.Listen(ctx, addr, listenOptions(cfg))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		open[addr] = ep
	}
	if len(errs) > 0 {
		closeAll(open)
		return nil, errors.Join(errs...)
	}
	if !stay {
		closeAll(open)
		clear(open)
	}
	return open, nil
}

func closeAll(endpoints map[netip.AddrPort]*resolver.Endpoint) {
	for _, ep := range endpoints {
		_ = ep.Close() // being given up
	}
}

// serve starts to answer on every endpoint.
func (d *daemon) serve() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for addr, ep := range d.endpoints {
		d.conditions.notReady("listen "+addr.String(), "not probed yet")
		if err := d.resolver.Serve(ep); err != nil {
			return err
		}
		d.log.Info("serving", "address", ep.Addr.String(), "readers", len(ep.UDP))
	}
	return nil
}

// listening returns the addresses that are served, ports resolved.
func (d *daemon) listening() []netip.AddrPort {
	d.mu.Lock()
	defer d.mu.Unlock()
	addrs := make([]netip.AddrPort, 0, len(d.endpoints))
	for _, ep := range d.endpoints {
		addrs = append(addrs, ep.Addr)
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	return addrs
}

// addEndpoint and removeEndpoint keep the table of what is served; interception
// opens and closes endpoints by itself.
func (d *daemon) addEndpoint(addr netip.AddrPort, ep *resolver.Endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endpoints[addr] = ep
}

func (d *daemon) removeEndpoint(addr netip.AddrPort) *resolver.Endpoint {
	d.mu.Lock()
	defer d.mu.Unlock()
	ep := d.endpoints[addr]
	delete(d.endpoints, addr)
	return ep
}

// setInterceptor makes an interception's counts visible.
func (d *daemon) setInterceptor(i *iptables.Interceptor) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.icp = i
}

// opened returns the addresses that are open, as they are configured.
func (d *daemon) opened() []netip.AddrPort {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.endpoints))
}

// config returns the configuration in use.
func (d *daemon) config() *config.Config {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg
}

// reload takes over a configuration, or keeps the old one and says why. One that
// is right but for the running process leaves it ready: the DaemonSet controller
// replaces all pods that are not ready at once, and the restart that such a
// configuration asks for would reach every node together.
func (d *daemon) reload(ctx context.Context, load func() (*config.Config, error)) {
	cfg, err := load()
	var keys []string
	if err == nil {
		old := d.config()
		if cfg.Hash() == old.Hash() {
			d.settleConfig("", "")
			return
		}
		if keys = changedAtRestart(old, cfg); len(keys) == 0 {
			err = d.apply(ctx, cfg)
		}
	}
	switch {
	case err != nil:
		d.countReload("failure")
		d.log.Error("configuration refused, the old one stays in use", "error", strings.Split(err.Error(), "\n"))
		// Not ready, although it answers as before: a look at the pods shows which
		// nodes run what nobody asked for.
		d.settleConfig("the latest configuration was refused, an older one is in use: "+strings.ReplaceAll(err.Error(), "\n", "; "), "")
	case len(keys) > 0:
		d.log.Warn("configuration waits for a restart, the old one stays in use", "keys", keys)
		d.settleConfig("", "the latest configuration waits, an older one is in use: these keys change only with a restart: "+strings.Join(keys, ", "))
	default:
		d.countReload("success")
		d.log.Info("configuration in use", "hash", cfg.Hash())
		d.settleConfig("", "")
		kick(d.reloaded)
	}
}

// settleConfig says what became of the latest configuration: that it was refused,
// that it waits for a restart, or neither.
func (d *daemon) settleConfig(refused, waits string) {
	d.configWaits.Store(waits != "")
	d.conditions.warn("config", waits)
	d.conditions.notReady("config", refused)
}

func (d *daemon) countReload(result string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reloads[result]++
}

// apply makes everything that the new configuration needs, and only then
// changes what is running.
func (d *daemon) apply(ctx context.Context, cfg *config.Config) error {
	old := d.config()
	settings, err := d.resolverSettings(cfg)
	if err != nil {
		return err
	}
	before := d.upstream()
	forwarder, service, err := d.newForwarder(cfg)
	if err != nil && (before != nil || !isServiceUnknown(err)) {
		return err
	}
	closeNew := func() error {
		if forwarder == nil {
			return nil
		}
		return forwarder.Close()
	}
	guard, err := d.newGuardChange(old, cfg, settings.Search.Policy)
	if err != nil {
		return errors.Join(err, closeNew(), guard.next.close())
	}
	var added, removed []netip.AddrPort
	if cfg.Intercept.Mode == config.InterceptNone { // else interception opens them
		added, removed = diff(d.opened(), cfg.Listen)
	}
	opened, err := d.openEndpoints(ctx, cfg, added, forwarder != nil)
	if err != nil {
		return errors.Join(err, closeNew(), guard.next.close())
	}
	if err = d.cache.Reconfigure(cacheConfig(cfg)); err == nil {
		err = d.resolver.Reconfigure(asked(forwarder), settings)
	}
	if err != nil {
		closeAll(opened)
		return errors.Join(err, closeNew(), guard.next.close())
	}
	d.level.Set(cfg.Log.Level)
	if w := d.watcher(); w != nil {
		w.SetListOf(settings.Search.Policy.ListOf)
	}

	d.mu.Lock()
	d.cfg, d.forwarder, d.service = cfg, forwarder, service
	if before != nil {
		d.leaving = append(d.leaving, before)
	}
	var leaving []*resolver.Endpoint
	for _, addr := range removed {
		leaving = append(leaving, d.endpoints[addr])
		delete(d.endpoints, addr)
		d.conditions.notReady("listen "+addr.String(), "")
	}
	for addr, ep := range opened {
		d.endpoints[addr] = ep
		if before == nil {
			d.conditions.notReady("listen "+addr.String(), "not probed yet")
		}
		err = errors.Join(err, d.resolver.Serve(ep))
		d.log.Info("serving", "address", ep.Addr.String(), "readers", len(ep.UDP))
	}
	d.mu.Unlock()
	d.changeGuard(ctx, guard)
	kick(d.relisten)
	// Flights under way end with the forwarder that they began with.
	d.background.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		for _, ep := range leaving {
			if err := d.resolver.Remove(ctx, ep); err != nil {
				d.log.Warn("leaving an address", "error", err)
			} else {
				d.log.Info("no longer serving", "address", ep.Addr.String())
			}
		}
		if before == nil {
			return
		}
		t := time.NewTimer(old.Timeouts.Total + time.Second)
		defer t.Stop()
		<-t.C
		d.retire(before)
	})
	return err
}

// diff returns what is only in the new list, and only in the old.
func diff(old, next []netip.AddrPort) (added, removed []netip.AddrPort) {
	for _, a := range next {
		if !slices.Contains(old, a) {
			added = append(added, a)
		}
	}
	for _, a := range old {
		if !slices.Contains(next, a) {
			removed = append(removed, a)
		}
	}
	return added, removed
}

// close answers what has been received and closes everything.
func (d *daemon) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	return errors.Join(d.resolver.Shutdown(ctx), d.undo())
}
