package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// The configuration in the words of each package.

// maxReaders bounds the sockets of one address where limits.readers leaves it
// to us: four readers take over 600,000 queries a second, more than a node has.
const maxReaders = 4

// receiveBuffers is the kernel memory of all UDP receive buffers together. It
// counts against the pod's memory limit. A socket has no use for more than 4
// MiB: 5,000 small datagrams, or 25 ms of a reader's work.
const (
	receiveBuffers   = 16 << 20
	maxReceiveBuffer = 4 << 20
)

func readers(cfg *config.Config) int {
	if cfg.Limits.Readers > 0 {
		return cfg.Limits.Readers
	}
	return min(runtime.GOMAXPROCS(0), maxReaders)
}

func listenOptions(cfg *config.Config) resolver.ListenOptions {
	n, addrs := readers(cfg), len(cfg.Listen)
	if cfg.Intercept.Mode == config.InterceptClusterIP {
		addrs += 2 // a ClusterIP of each family
	}
	return resolver.ListenOptions{
		Readers:       n,
		ReceiveBuffer: min(receiveBuffers/(n*max(1, addrs)), maxReceiveBuffer),
	}
}

func (d *daemon) resolverSettings(cfg *config.Config) (resolver.Settings, error) {
	policy, err := search.New(search.Config{
		ClusterDomain: cfg.ClusterDomain, Domains: cfg.Search.Domains, NDots: cfg.Search.NDots, Expand: cfg.Search.Expand,
	})
	if err != nil {
		return resolver.Settings{}, fmt.Errorf("search: %w", err)
	}
	d.warnOfNodeDomains(cfg, nodeResolvConf)
	walks := &resolver.Search{Policy: policy, Collapse: cfg.Search.Collapse, Client: d.searchList}
	for _, t := range cfg.Search.Types {
		walks.Types = append(walks.Types, uint16(t))
	}
	var aaaaZone []byte
	if cfg.AAAA == config.AAAANoData {
		if aaaaZone, err = search.WireName(cfg.ClusterDomain); err != nil {
			return resolver.Settings{}, fmt.Errorf("clusterDomain: %w", err)
		}
	}
	return resolver.Settings{
		Search:   walks,
		AAAAZone: aaaaZone,
		Limits: resolver.Limits{
			InFlight: cfg.Limits.InFlight, InFlightPerClient: cfg.Limits.InFlightPerClient,
			Conns: cfg.Limits.TCPConnections, ConnsPerClient: cfg.Limits.TCPConnectionsPerClient,
		},
		StaleAfter: cfg.Timeouts.Stale,
		Total:      cfg.Timeouts.Total,
		Prefetch:   cfg.Cache.Prefetch,
	}, nil
}

func cacheConfig(cfg *config.Config) cache.Config {
	c := cache.Config{Size: int64(cfg.Cache.Size)}
	for _, z := range cfg.Cache.Zones {
		// NODATA goes stale with the addresses of the other family: musl
		// fails a whole look-up when one of its two answers is SERVFAIL.
		// NXDOMAIN never does: a name that was denied may exist by now.
		c.Zones = append(c.Zones, cache.Zone{
			Name: z.Name, Positive: z.Positive, Negative: z.Negative, Stale: z.Stale, StaleNoData: z.Stale,
		})
	}
	return c
}

// usesService reports whether the cluster's DNS Service is an upstream.
func usesService(cfg *config.Config) bool {
	return slices.ContainsFunc(cfg.Upstreams, func(u config.Upstream) bool {
		return slices.ContainsFunc(u.Servers, func(s config.Server) bool { return s.Service })
	})
}

// upstreamConfig returns the forwarder's configuration; service are the
// addresses of the cluster's DNS Service, as far as they are known. What has no other
// servers is left out.
func upstreamConfig(cfg *config.Config, service []netip.Addr) upstream.Config {
	u := upstream.Config{
		Timeouts: upstream.Timeouts{Hedge: cfg.Timeouts.Hedge, Retry: cfg.Timeouts.Retry, Total: cfg.Timeouts.Total},
		Budget:   upstream.Budget{Hedge: cfg.Budget.Hedge, Retry: cfg.Budget.Retry},
		Self:     isSelf(cfg.Listen),
	}
	if cfg.Intercept.Mode != config.InterceptNone {
		u.Control = iptables.MarkUpstream(uint32(cfg.Intercept.Mark))
	}
	for _, up := range cfg.Upstreams {
		r := upstream.Route{Zones: up.Zones}
		switch up.Protocol {
		case config.ProtocolUDP:
			r.Protocol = upstream.UDPOnly
		case config.ProtocolTCP:
			r.Protocol = upstream.TCPOnly
		}
		for _, s := range up.Servers {
			if !s.Service {
				r.Servers = append(r.Servers, upstream.Server{Addr: s.Addr, File: s.File})
				continue
			}
			for _, addr := range service {
				r.Servers = append(r.Servers, upstream.Server{Addr: netip.AddrPortFrom(addr, dnsPort)})
			}
		}
		if len(r.Servers) > 0 {
			u.Routes = append(u.Routes, r)
		}
	}
	return u
}

// dnsPort is the port of the cluster's DNS Service, as kubelet assumes it.
const dnsPort = 53

// serviceVariable is the variable in which kubelet tells every pod of the
// Service's namespace its address.
func serviceVariable(name config.ServiceName) string {
	return strings.ToUpper(strings.ReplaceAll(name.Name, "-", "_")) + "_SERVICE_HOST"
}

// serviceFromEnvironment returns the address of the cluster's DNS Service as
// kubelet tells it, or none.
func serviceFromEnvironment(name config.ServiceName) []netip.Addr {
	addr, err := netip.ParseAddr(os.Getenv(serviceVariable(name)))
	if err != nil {
		return nil
	}
	return []netip.Addr{addr}
}

// serviceUnknownError tells that the addresses of the cluster's DNS Service are
// needed and not known, why, and what to do.
type serviceUnknownError struct {
	name     config.ServiceName
	why, fix string
}

// Error returns all of it.
func (e *serviceUnknownError) Error() string {
	return fmt.Sprintf("the address of the Service %v is not known: %s; %s", e.name, e.why, e.fix)
}

func isServiceUnknown(err error) bool {
	var unknown *serviceUnknownError
	return errors.As(err, &unknown)
}

// serviceUnknown says what is wrong where the Service's address is needed.
func (d *daemon) serviceUnknown(cfg *config.Config) error {
	e := &serviceUnknownError{name: cfg.Kubernetes.DNSService}
	s := d.cluster.Load()
	switch {
	case s == nil || s.DNS == nil:
		e.why = "the cluster has not told it, and the environment has no " + serviceVariable(e.name)
		e.fix = "run in its namespace, or name the servers' addresses"
	case slices.Contains(s.Missing, kube.Name(e.name)):
		e.why = "the cluster has no such Service"
		e.fix = "create it, name another in kubernetes.dnsService, or name the servers' addresses"
	default:
		e.why = "it has no ClusterIP (headless, or an ExternalName)"
		e.fix = "name another in kubernetes.dnsService, or name the servers' addresses"
	}
	return e
}

// isSelf returns what tells our own addresses from others': forwarding to them
// would loop.
func isSelf(listen []netip.AddrPort) func(netip.AddrPort) bool {
	return func(server netip.AddrPort) bool {
		for _, l := range listen {
			switch {
			case l == server:
				return true
			case l.Port() == server.Port() && l.Addr().IsUnspecified() && isLocal(server.Addr()):
				return true
			}
		}
		return false
	}
}

// isLocal reports whether an interface of this machine has the address.
func isLocal(a netip.Addr) bool {
	if a.IsLoopback() || a.IsUnspecified() {
		return true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, i := range addrs {
		if p, err := netip.ParsePrefix(i.String()); err == nil && p.Addr().Unmap() == a.Unmap() {
			return true
		}
	}
	return false
}

// changedAtRestart names the keys, in order, in which the configurations differ and
// that a running process does not change.
func changedAtRestart(old, next *config.Config) (keys []string) {
	differ := func(key string, old, next any) {
		if !reflect.DeepEqual(old, next) {
			keys = append(keys, key)
		}
	}
	differ("control", old.Control, next.Control)
	differ("http", old.HTTP, next.HTTP)
	keys = append(keys, changedFields("kubernetes", old.Kubernetes, next.Kubernetes)...)
	keys = append(keys, changedFields("intercept", old.Intercept, next.Intercept)...)
	if old.Intercept.Mode != config.InterceptNone {
		differ("listen (with interception)", old.Listen, next.Listen)
	}
	differ("log.format", old.Log.Format, next.Log.Format)
	return keys
}

// changedFields names the keys of a group in which its values, of one type of struct,
// differ.
func changedFields(group string, old, next any) (keys []string) {
	before, after := reflect.ValueOf(old), reflect.ValueOf(next)
	for i := range before.NumField() {
		if !reflect.DeepEqual(before.Field(i).Interface(), after.Field(i).Interface()) {
			keys = append(keys, group+"."+keyName(before.Type().Field(i).Name))
		}
	}
	return keys
}

// keyName returns the key that a field is named after: DNSService is dnsService.
func keyName(field string) string {
	capitals := strings.IndexFunc(field, func(r rune) bool { return r >= 'a' })
	return strings.ToLower(field[:max(1, capitals-1)]) + field[max(1, capitals-1):]
}
