package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver"
)

// How often the interception is looked after, beside what the kernel tells.
const (
	interceptTick  = time.Second
	interceptRetry = 5 * time.Second
	// How long NodeLocal DNSCache may take to close its sockets once it has
	// given up its addresses, and how often to look.
	interceptRelease = 10 * time.Second
	interceptPoll    = 5 * time.Millisecond
	// How often to look whether a predecessor still serves.
	interceptTurn = 100 * time.Millisecond
)

// Reasons of withdrawals, in metrics and logs.
const (
	reasonUpstream = "no_upstream" // none has answered yet
	reasonLeaving  = "leaving"
)

// interception is the daemon's side of package iptables: which addresses are
// to be taken, by which sockets, and when.
type interception struct {
	d   *daemon
	cfg *config.Config

	icp     *iptables.Interceptor
	run     chan struct{} // closed when icp.Run has returned
	sockets map[netip.AddrPort]*iptables.Sockets
	targets iptables.Targets
	held    bool // withdrawn until an upstream has answered
	starved starvation
	freed   time.Time     // when NodeLocal DNSCache gave up its addresses
	awaits  string        // what is waited for, as it was logged
	changed chan struct{} // capacity 1: something has been told by event
}

func newInterception(d *daemon, cfg *config.Config) *interception {
	return &interception{d: d, cfg: cfg, sockets: map[netip.AddrPort]*iptables.Sockets{}, changed: make(chan struct{}, 1)}
}

// iptablesConfig returns the interception of a configuration, for a cluster
// whose DNS Service has the given addresses.
func iptablesConfig(cfg *config.Config, clusterIPs, excluded []netip.Addr) iptables.Config {
	c := iptables.Config{
		Backend: iptables.Backend(cfg.Intercept.Backend), Mark: uint32(cfg.Intercept.Mark), Table: int(cfg.Intercept.Table),
		RulePriority: cfg.Intercept.RulePriority, Zone: cfg.Intercept.Zone, AliveTimeout: cfg.Intercept.AliveTimeout,
		Probe: dnswire.AppendQuery(nil, 0, dnswire.FlagRD, probeName, dnswire.TypeANY, dnswire.ClassIN, nil),
		Targets: iptables.Targets{
			Addresses: slices.Clone(cfg.Listen), ClusterIPs: clusterIPs, Exclude: slices.Clone(cfg.Intercept.Exclude),
		},
	}
	if cfg.Intercept.Mode == config.InterceptClusterIP {
		for _, ip := range clusterIPs {
			if a := netip.AddrPortFrom(ip, 53); !slices.Contains(c.Addresses, a) {
				c.Addresses = append(c.Addresses, a)
			}
		}
	}
	for _, a := range excluded {
		c.Exclude = append(c.Exclude, netip.PrefixFrom(a, a.BitLen()))
	}
	return c
}

// wanted returns what is to be intercepted now.
func (i *interception) wanted() iptables.Config {
	ips, heard := i.d.clusterIPsHeard()
	c := iptablesConfig(i.cfg, ips, i.d.excludedClients())
	c.Provisional = !heard // the environment tells of one family
	c.Received = func(c iptables.Client) uint64 {
		t := resolver.UDP
		if c.Proto == iptables.TCP {
			t = resolver.TCP
		}
		return i.d.resolver.Received(c.Addr, t)
	}
	c.Dropped = func() (sum uint64) {
		for _, s := range i.d.resolver.Stats().Drops {
			sum += s.Drops
		}
		return sum
	}
	c.OnEvent = i.event
	return c
}

// keep makes the kernel carry what is wanted, now and whenever that changes,
// until ctx ends. started is told how the first try went; a later one that
// fails is repeated.
func (i *interception) keep(ctx context.Context, started func(error)) {
	tick := time.NewTicker(interceptTick)
	defer tick.Stop()
	retry := time.NewTimer(0)
	defer retry.Stop()
	upstream := i.d.heard
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
		case <-i.d.clusterChanged:
		case <-upstream:
			upstream = nil
			i.release()
			continue
		case <-tick.C:
			i.feel()
			i.look()
			continue
		case <-i.changed:
			i.look()
			continue
		}
		cluster := i.d.cluster.Load()
		err := i.apply(ctx)
		i.look() // before the conditions that began with the start go
		if cluster != nil {
			i.d.conditions.notReady(clusterApplied, "")
		}
		if early := (*earlyError)(nil); started != nil && !errors.As(err, &early) {
			started(err)
			started = nil
		}
		i.tell(ctx, err)
		if err != nil {
			retry.Reset(interceptRetry)
		}
	}
}

// earlyError tells what has to be known before the interception can begin.
type earlyError struct{ what string }

func (e *earlyError) Error() string { return e.what + " is not known yet" }

// tell keeps the condition that says how the last try went.
func (i *interception) tell(ctx context.Context, err error) {
	var early *earlyError
	switch {
	case err == nil:
		i.awaits = ""
		i.d.conditions.notReady("intercept", "")
	case ctx.Err() != nil:
	case errors.As(err, &early): // the way of every start without the variable of the Service
		// The upstreams wait for the same, if they do.
		if i.awaits != early.what && (i.d.upstream() != nil || !usesService(i.d.config())) {
			i.d.log.Info("waiting", "reason", err.Error())
		}
		i.awaits = early.what
		i.d.conditions.notReady("intercept", "waiting: "+err.Error())
	default:
		i.d.log.Error("interception", "error", err)
		i.d.conditions.notReady("intercept", err.Error())
	}
}

// apply opens sockets for new addresses, has the kernel take what is wanted,
// and closes the sockets of addresses that are not wanted any more.
func (i *interception) apply(ctx context.Context) error {
	c := i.wanted()
	if len(c.ClusterIPs) == 0 && i.needsClusterIPs() {
		if err := i.checkEarly(c); err != nil {
			return err
		}
		return &earlyError{fmt.Sprintf("the ClusterIP of the Service %v", i.cfg.Kubernetes.DNSService)}
	}
	if i.icp != nil && targetsEqual(c.Targets, i.targets) {
		return nil
	}
	if err := i.standBy(ctx, c.Addresses); err != nil {
		return err
	}
	if err := i.awaitTurn(ctx, c.Addresses); err != nil {
		return err
	}
	if i.icp == nil {
		if err := i.begin(ctx, c); err != nil {
			return err
		}
	} else {
		if err := i.openAll(ctx, c.Addresses); err != nil {
			return err
		}
		if err := i.icp.Apply(c.Targets); err != nil {
			return err
		}
	}
	i.targets = c.Targets
	for a := range i.sockets {
		if !slices.Contains(c.Addresses, a) {
			i.close(ctx, a)
		}
	}
	return nil
}

// needsClusterIPs reports whether nothing is to be taken before the ClusterIPs are
// known: they are what is to be taken, or there is nobody else to ask.
func (i *interception) needsClusterIPs() bool {
	return i.cfg.Intercept.Mode == config.InterceptClusterIP || i.icp == nil && i.d.upstream() == nil
}

// checkEarly finds what is wrong whatever the ClusterIPs will be.
func (i *interception) checkEarly(c iptables.Config) error {
	if len(c.Addresses) == 0 {
		return nil
	}
	if _, err := iptables.New(c); err != nil {
		return err
	}
	var ips []netip.Addr
	for _, a := range c.Addresses {
		ips = append(ips, a.Addr())
	}
	err := iptables.CheckAddresses(ips)
	if held := (*iptables.AddressError)(nil); errors.As(err, &held) && held.NodeLocal() {
		return nil
	}
	return err
}

func targetsEqual(a, b iptables.Targets) bool {
	return a.Provisional == b.Provisional && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.ClusterIPs, b.ClusterIPs) && slices.Equal(a.Exclude, b.Exclude)
}

// standBy waits while NodeLocal DNSCache has one of the addresses: it serves
// them well, and takes them away when it goes. Anybody else is an error.
func (i *interception) standBy(ctx context.Context, addrs []netip.AddrPort) error {
	var ips []netip.Addr
	for _, a := range addrs {
		if i.sockets[a] == nil {
			ips = append(ips, a.Addr())
		}
	}
	err := iptables.CheckAddresses(ips)
	var held *iptables.AddressError
	if !errors.As(err, &held) || !held.NodeLocal() {
		return err
	}
	i.d.log.Info("standing by: NodeLocal DNSCache serves the address", "address", held.Addr.String(), "interface", held.Interface)
	i.d.conditions.notReady("intercept", "standing by: "+held.Error())
	if err := iptables.AwaitAddresses(ctx, ips); err != nil {
		return err
	}
	i.freed = time.Now()
	i.d.log.Info("the addresses are free: taking over")
	return nil
}

// awaitTurn waits while a predecessor had better keep the addresses to itself.
func (i *interception) awaitTurn(ctx context.Context, addrs []netip.AddrPort) error {
	look := time.NewTicker(interceptTurn)
	defer look.Stop()
	last := ""
	for {
		reason, err := i.mustWait(addrs)
		if err != nil || reason == "" {
			return err
		}
		if reason != last {
			i.d.log.Info("waiting", "reason", reason)
			i.d.conditions.notReady("intercept", "waiting: "+reason)
			last = reason
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// mustWait returns the reason to leave the addresses to a predecessor, if there
// is one.
func (i *interception) mustWait(addrs []netip.AddrPort) (string, error) {
	other, err := iptables.OtherMark(uint32(i.cfg.Intercept.Mark))
	if err != nil {
		return "", err
	}
	if other {
		return "another dnsguard with another intercept.mark has to end first", nil
	}
	select {
	case <-i.d.heard:
		return "", nil
	default:
	}
	// A predecessor may serve well, or at least from its cache, where we can
	// answer nothing: with a wrong list of upstreams, or in their outage. With the
	// sockets we would take all its queries, while its rules go on to take them
	// from kube-proxy.
	addr, err := i.servedByOthers(addrs)
	if err != nil || !addr.IsValid() {
		return "", err
	}
	return fmt.Sprintf("another process serves %v, and no upstream has answered us", addr), nil
}

// servedByOthers returns an address that somebody else has sockets on, if there
// is one.
func (i *interception) servedByOthers(addrs []netip.AddrPort) (netip.AddrPort, error) {
	for _, a := range addrs {
		if i.sockets[a] != nil {
			continue
		}
		if served, err := iptables.Served(a); served || err != nil {
			return a, err
		}
	}
	return netip.AddrPort{}, nil
}

// openAll opens the addresses that are not open.
func (i *interception) openAll(ctx context.Context, addrs []netip.AddrPort) error {
	for _, a := range addrs {
		if err := i.openFree(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// openFree opens an address, and waits for the sockets of one that has stood
// aside: NodeLocal DNSCache takes its addresses away before it closes them.
func (i *interception) openFree(ctx context.Context, addr netip.AddrPort) error {
	for {
		err := i.open(ctx, addr)
		if !errors.Is(err, unix.EADDRINUSE) || time.Since(i.freed) > interceptRelease {
			return err
		}
		select {
		case <-time.After(interceptPoll):
		case <-ctx.Done():
			return err
		}
	}
}

// open opens the sockets of one address, and serves them at once: the kernel
// gives them their share of what arrives from the moment that they are bound.
func (i *interception) open(ctx context.Context, addr netip.AddrPort) error {
	if i.sockets[addr] != nil {
		return nil
	}
	o := listenOptions(i.cfg)
	s, err := iptables.Listen(ctx, addr, iptables.ListenConfig{UDP: o.Readers, TCP: 1, Net: o.NetConfig()})
	if err != nil {
		return err
	}
	ep := &resolver.Endpoint{Addr: addr, UDP: s.UDP, TCP: s.TCP}
	if err := i.d.resolver.Serve(ep); err != nil {
		return errors.Join(err, s.Close())
	}
	i.sockets[addr] = s
	i.d.addEndpoint(addr, ep)
	if err := s.Steer(); err != nil {
		// Old kernels: a predecessor that hangs keeps its share.
		i.d.log.Warn("queries may still go to an older process", "address", addr.String(), "error", err)
	}
	i.d.log.Info("serving", "address", addr.String(), "readers", len(s.UDP), "transparent", true)
	return nil
}

// close stops to serve an address.
func (i *interception) close(ctx context.Context, addr netip.AddrPort) {
	delete(i.sockets, addr)
	i.d.conditions.notReady("intercept "+addr.String(), "")
	ep := i.d.removeEndpoint(addr)
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	if err := i.d.resolver.Remove(ctx, ep); err != nil {
		i.d.log.Warn("leaving an address", "error", err)
		return
	}
	i.d.log.Info("no longer serving", "address", addr.String())
}

// begin opens the sockets and has the kernel take packets. Until an upstream has
// answered, it takes none: queries are better off on kube-proxy's path.
func (i *interception) begin(ctx context.Context, c iptables.Config) error {
	icp, err := iptables.New(c)
	if err != nil {
		return err
	}
	if err := icp.Claim(); err != nil {
		return err
	}
	if err := i.openAll(ctx, c.Addresses); err != nil {
		return errors.Join(err, icp.Close())
	}
	if err := icp.Start(ctx); err != nil {
		return err
	}
	select {
	case <-i.d.heard:
	default:
		i.held = true
		if err := icp.Withdraw(reasonUpstream, iptables.All); err != nil {
			return errors.Join(err, icp.Close())
		}
	}
	i.icp, i.run = icp, make(chan struct{})
	s := icp.Stats()
	i.d.log.Info("intercepting", "backend", string(s.Backend), "reason", s.Reason)
	go func() {
		defer close(i.run)
		_ = icp.Run(ctx) // nil, always
	}()
	i.d.setInterceptor(icp)
	return nil
}

// release lets the kernel take packets, now that an upstream has answered.
func (i *interception) release() {
	if !i.held {
		return
	}
	i.held = false
	if i.starved.text != "" {
		return // feel takes them, in time
	}
	if err := i.icp.Restore(iptables.All); err != nil {
		i.d.log.Warn("interception", "error", err) // it is repaired by Run
	}
}

// look keeps the conditions, and ends the steering of sockets once they are
// alone.
func (i *interception) look() {
	if i.icp == nil {
		return
	}
	s := i.icp.Stats()
	for addr, active := range s.Active {
		text := ""
		if !active {
			text = "queries take kube-proxy's path"
			for service, err := range s.ProbeErrors {
				if service.Addr == addr {
					text += fmt.Sprintf("; our own %v query: %v", service.Proto, err)
				}
			}
		}
		i.d.conditions.notReady("intercept "+addr.String(), text)
	}
	text := ""
	if err := errors.Join(s.RepairError, s.AliveError, s.BypassError); err != nil {
		text = err.Error()
	}
	i.d.conditions.warn("intercept", text)
	text = ""
	if len(s.ForeignRules) > 0 {
		text = fmt.Sprintf("routing rules of others sort before ours and may lead queries away: %v", s.ForeignRules)
	}
	i.d.conditions.warn("intercept rules", text)
	text = ""
	if s.Bypassed > 0 {
		text = fmt.Sprintf("%d clients do not reach us and are let past (a NetworkPolicy or firewall on the way to the node?)", s.Bypassed)
	}
	i.d.conditions.warn("intercept clients", text)
	for addr, sockets := range i.sockets {
		if _, err := sockets.Settle(); err != nil {
			i.d.log.Debug("settle sockets", "address", addr.String(), "error", err)
		}
	}
}

// event logs what the interceptor tells, and has the conditions follow.
func (i *interception) event(e iptables.Event) {
	log := i.d.log
	select {
	case i.changed <- struct{}{}:
	default:
	}
	switch e.Kind {
	case iptables.Taking:
		log.Info("taking queries", "address", e.Service.Addr.String(), "transport", e.Service.Proto.String())
	case iptables.Withdrawn:
		log.Warn("withdrawn: queries take kube-proxy's path", "address", e.Service.Addr.String(), "transport", e.Service.Proto.String(), "reason", e.Reason)
	case iptables.Bypassed:
		log.Warn("client does not reach us and is let past", "client", e.Client.Addr.String(), "transport", e.Client.Proto.String(), "for", e.Detail)
	case iptables.Returned:
		log.Info("client is taken again", "client", e.Client.Addr.String(), "transport", e.Client.Proto.String())
	case iptables.Repaired:
		log.Warn("rules or routes had been removed by somebody, and are back")
	case iptables.RepairFailed:
		log.Error("rules or routes are missing and cannot be put back", "error", e.Err)
	case iptables.ForeignRule:
		log.Warn("a routing rule of somebody else sorts before ours", "rule", e.Detail)
	case iptables.ForeignRoute:
		log.Warn("a route of somebody else was in the place of ours in intercept.table, and was removed", "route", e.Detail)
	}
}

// withdraw leaves all queries to kube-proxy; the sockets are still served. Run
// must be told to end before.
func (i *interception) withdraw() error {
	if i.icp == nil {
		return nil
	}
	<-i.run
	return i.icp.Withdraw(reasonLeaving, iptables.All)
}

// end removes what is left in the kernel, but for the fallback of link-local
// addresses; the sockets are closed by now.
func (i *interception) end() error {
	if i.icp == nil {
		return nil
	}
	return i.icp.Close()
}
