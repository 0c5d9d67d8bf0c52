package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// guarding is the guard of one configuration, with its table. A reload that
// changes the configuration of the guard replaces it.
type guarding struct {
	guard   *ctguard.Guard
	kernel  *ctguard.Kernel
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// newGuarding makes a conntrack guard, or returns nil where the configuration
// wants none.
func (d *daemon) newGuarding(cfg *config.Config) (*guarding, error) {
	if !cfg.Guard.Enabled {
		return nil, nil
	}
	kernel, err := ctguard.OpenKernel(0)
	if err != nil {
		return nil, fmt.Errorf("guard: %w; without the capability NET_ADMIN or conntrack, set guard.enabled to false", err)
	}
	prober, err := ctguard.NewUDPProber(cfg.ClusterDomain)
	if err != nil {
		return nil, errors.Join(err, kernel.Close())
	}
	c := ctguard.Config{
		Table: kernel, Events: kernel, Host: kernel, Prober: prober,
		Resync: cfg.Guard.Resync, DryRun: cfg.Guard.DryRun, Evidence: cfg.Guard.Evidence,
		OnPurge: d.onPurge,
		OnState: func(s ctguard.State) { d.log.Info("guard", "state", s.String(), "message", s.Message()) },
	}
	if cfg.Intercept.Mode != config.InterceptNone {
		c.Zones = []uint16{cfg.Intercept.Zone} // the link-local fallback's flows
	}
	guard, err := ctguard.New(c)
	if err != nil {
		return nil, errors.Join(err, kernel.Close())
	}
	return &guarding{guard: guard, kernel: kernel, cancel: func() {}}, nil
}

// run has the guard work, if there is one, until ctx ends or close.
func (g *guarding) run(ctx context.Context) {
	if g == nil {
		return
	}
	ctx, g.cancel = context.WithCancel(ctx)
	g.running.Go(func() { _ = g.guard.Run(ctx) }) // nil, always
}

// close ends the guard, if there is one.
func (g *guarding) close() error {
	if g == nil {
		return nil
	}
	g.cancel()
	g.running.Wait()
	return g.kernel.Close()
}

// guardChange is what a new configuration needs in place of the guard.
type guardChange struct {
	differs bool
	next    *guarding     // nil: none is wanted
	watcher *kube.Watcher // for the Services that it guards; nil: as before
}

// newGuardChange makes what a new configuration needs, and changes nothing yet.
func (d *daemon) newGuardChange(old, cfg *config.Config, policy *search.Policy) (c guardChange, err error) {
	if reflect.DeepEqual(old.Guard, cfg.Guard) {
		return c, nil
	}
	c.differs = true
	if !slices.Equal(guardedServices(old), guardedServices(cfg)) {
		if c.watcher, err = d.newWatcher(cfg, policy); err != nil {
			return c, fmt.Errorf("kubernetes: %w", err)
		}
	}
	c.next, err = d.newGuarding(cfg)
	return c, err
}

// changeGuard puts another guard in the place of the one that there is. It begins
// anew: what its predecessor had found out by itself is lost, but for the endpoints
// that it knew of the same Services, and frontends that are no longer configured are
// not taken for vanished ones. If it is to watch
// other Services, it has nothing to judge by until they have been read; meanwhile
// all else that is known of the cluster stays in force.
func (d *daemon) changeGuard(ctx context.Context, c guardChange) {
	if !c.differs {
		return
	}
	before := d.guarding.Load()
	if c.watcher != nil {
		d.following.Load().end()
	}
	d.guardMu.Lock()
	state := d.cluster.Load()
	if c.watcher != nil && state != nil {
		without := *state
		without.Guard = nil
		state = &without
		d.cluster.Store(state)
	}
	d.guarding.Store(c.next)
	if c.next != nil && state != nil && state.Guard != nil {
		if before != nil && c.watcher == nil {
			c.next.guard.Recall(before.guard)
		}
		c.next.guard.Update(state.Guard)
		c.next.guard.Doubt(c.watcher == nil && d.outOfTouch())
	}
	d.guardMu.Unlock()
	if err := before.close(); err != nil {
		d.log.Warn("closing the former guard", "error", err)
	}
	c.next.run(ctx)
	if c.watcher != nil {
		d.refollows.Store(state != nil)
		d.follow(ctx, c.watcher)
	}
	d.log.Info("the guard's configuration is in use", "enabled", c.next != nil)
}

// guardedServices returns the Services that a configuration has guarded.
func guardedServices(cfg *config.Config) []config.ServiceName {
	if !cfg.Guard.Enabled {
		return nil
	}
	return cfg.Guard.Services
}

// onPurge writes the audit log: a line for every flow that was deleted, or in a
// dry run would have been.
func (d *daemon) onPurge(p ctguard.Purge) {
	attrs := []any{
		"client", p.Flow.Orig.Src.String(), "frontend", p.Flow.Orig.Dst.String(), "endpoint", p.Flow.Reply.Src.String(),
		"service", p.Frontend.Service, "reason", p.Reason.String(), "by_event", p.Event,
	}
	if age, known := p.Flow.Age(time.Now()); known {
		attrs = append(attrs, "age", age.String())
	}
	if p.DryRun {
		d.log.Info("flow would be deleted, were this no dry run", attrs...)
		return
	}
	// The flow may be one of our own sockets': its questions are asked again
	// over another one.
	if n := d.retireSockets(p.Flow.Orig.Src, p.Flow.Orig.Dst); n > 0 {
		attrs = append(attrs, "own_sockets", n)
	}
	d.log.Info("flow deleted", attrs...)
}

// retireSockets retires our own upstream sockets with these addresses, those of
// forwarders that a reload has replaced too.
func (d *daemon) retireSockets(local, remote netip.AddrPort) int {
	d.mu.Lock()
	forwarders := append(slices.Clone(d.leaving), d.forwarder)
	d.mu.Unlock()
	n := 0
	for _, f := range forwarders {
		if f != nil { // the cluster is heard before the first is made
			n += f.RetireSockets(func(l, r netip.AddrPort) bool { return l == local && r == remote })
		}
	}
	d.retiredSockets.Add(uint64(n))
	return n
}

// flowsPage is where the control socket tells the flows.
const flowsPage = "/flows"

// flowStatus is a flow with the guard's verdict, as dnsguard flows prints it.
type flowStatus struct {
	Client   string `json:"client"`
	Frontend string `json:"frontend"`
	Endpoint string `json:"endpoint"`
	Service  string `json:"service"`
	Verdict  string `json:"verdict"`
	Reason   string `json:"reason"`
	Expires  int    `json:"expiresSeconds"`
	Assured  bool   `json:"assured"`
	Zone     uint16 `json:"zone"`
}

func flowsCommand() command {
	return command{
		name:    "flows",
		summary: "list this node's DNS flows with the guard's verdict and its reason",
		example: "dnsguard flows --stale",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			stale := fs.Bool("stale", false, "only those that lead to endpoints that are gone")
			format := outputFlag(fs)
			_, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "flows", args) {
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("flows", err)
				}
				ctx, cancel := context.WithTimeout(ctx, flowsTimeout)
				defer cancel()
				flows, missing, err := listFlows(ctx, cfg)
				if err != nil {
					return c.fail("flows", err)
				}
				for _, watch := range missing {
					fmt.Fprintf(c.err, "dnsguard flows: not read, and left out: %s\n", watch)
				}
				if *stale {
					flows = staleOnly(flows)
				}
				if *format == "json" {
					return c.json(flows)
				}
				writeFlows(c.out, flows)
				return exitOK
			}
		},
	}
}

// flowsTimeout bounds the reading of the cluster's objects and of the table.
const flowsTimeout = 15 * time.Second

func staleOnly(flows []flowStatus) []flowStatus {
	out := []flowStatus{}
	for _, f := range flows {
		if f.Verdict == ctguard.Stale.String() {
			out = append(out, f)
		}
	}
	return out
}

// listFlows asks the running daemon or, where none answers, looks by itself: then
// unreadable is what of the cluster could not be read.
func listFlows(ctx context.Context, cfg *config.Config) (flows []flowStatus, unreadable []string, err error) {
	err = getJSON(ctx, cfg.Control, flowsPage, &flows)
	if !errors.Is(err, errNoDaemon) {
		return flows, nil, err
	}
	if cfg.Kubernetes.Source == config.SourceNone {
		return nil, nil, fmt.Errorf("%w, and kubernetes.source is none: there is nothing to judge flows by", err)
	}
	cfg.Listen, cfg.Guard.Enabled, cfg.Guard.DryRun = nil, true, true
	cfg.Intercept.Mode, cfg.Search.Collapse, cfg.Search.Expand = config.InterceptNone, false, false
	log, level := newLogger(io.Discard, cfg.Log)
	d, err := newDaemon(ctx, cfg, log, level)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = d.close() }()
	for {
		if s := d.cluster.Load(); s != nil && s.Guard != nil {
			flows, err = d.flows(ctx)
			return flows, unreadServices(d.watcher().Stats()), err
		}
		select {
		case <-d.clusterChanged:
		case <-ctx.Done():
			return nil, nil, errors.New("the cluster's Services and EndpointSlices could not be read in time")
		}
	}
}

// flows lists the flows to the watched Services.
func (d *daemon) flows(ctx context.Context) ([]flowStatus, error) {
	g := d.guarding.Load()
	if g == nil {
		return nil, errors.New("the guard of the running daemon is off (guard.enabled: false), and nobody else judges flows; conntrack -L -p udp --dport 53 lists them")
	}
	found, err := g.guard.Flows(ctx)
	if err != nil {
		return nil, err
	}
	flows := make([]flowStatus, 0, len(found))
	for _, f := range found {
		flows = append(flows, flowStatus{
			Client: f.Flow.Orig.Src.String(), Frontend: f.Flow.Orig.Dst.String(), Endpoint: f.Flow.Reply.Src.String(),
			Service: f.Frontend.Service, Verdict: f.Verdict.String(), Reason: f.Reason.String(),
			Expires: int(f.Flow.Remaining.Seconds()), Assured: f.Flow.Assured, Zone: f.Flow.OriginalZone(),
		})
	}
	return flows, nil
}

// flowsHTTP is flows on the control socket.
func (d *daemon) flowsHTTP(w http.ResponseWriter, r *http.Request) {
	flows, err := d.flows(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	writeJSON(w, flows)
}

func writeFlows(out io.Writer, flows []flowStatus) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CLIENT\tFRONTEND\tENDPOINT\tSERVICE\tVERDICT\tREASON\tEXPIRES")
	for _, f := range flows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d s\n", f.Client, f.Frontend, f.Endpoint, f.Service, f.Verdict, f.Reason, f.Expires)
	}
	_ = w.Flush()
}
