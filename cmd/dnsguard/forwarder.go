package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// upstream returns the forwarder in use, or nil while the addresses of the
// cluster's DNS Service are waited for.
func (d *daemon) upstream() *upstream.Forwarder {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.forwarder
}

// serviceInUse returns the addresses that the forwarder asks as the cluster's
// DNS Service.
func (d *daemon) serviceInUse() []netip.Addr {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.service
}

// newForwarder makes the forwarder of a configuration, and has its news logged.
// It returns the addresses that it asks as the cluster's DNS Service. Where they are
// needed and not known, nothing else is wrong with the upstreams if that is the error.
func (d *daemon) newForwarder(cfg *config.Config) (*upstream.Forwarder, []netip.Addr, error) {
	service := d.clusterIPs()
	u := upstreamConfig(cfg, service)
	unknown := usesService(cfg) && len(service) == 0
	if unknown && len(u.Routes) == 0 {
		return nil, nil, fmt.Errorf("upstreams: %w", d.serviceUnknown(cfg))
	}
	u.OnServers = func(file string, servers []netip.AddrPort, err error) {
		if err != nil {
			d.log.Warn("nameservers not read, the old ones stay in use", "file", file, "error", err)
			return
		}
		d.log.Info("nameservers read", "file", file, "servers", servers)
	}
	u.OnHealth = func(h upstream.Health) {
		if h.Up {
			d.log.Info("upstream answers again", "server", h.Server, "transport", h.Transport.String())
			return
		}
		d.log.Warn("upstream does not answer, asked only now and then", "server", h.Server, "transport", h.Transport.String())
	}
	f, err := upstream.New(u)
	if err != nil {
		return nil, nil, fmt.Errorf("upstreams: %w", err)
	}
	if unknown {
		return nil, nil, errors.Join(fmt.Errorf("upstreams: %w", d.serviceUnknown(cfg)), f.Close())
	}
	return f, service, nil
}

// asked returns what the resolver asks: a forwarder or, while there is none, nobody.
func asked(f *upstream.Forwarder) resolver.Forwarder {
	if f == nil {
		return nobody{}
	}
	return f
}

// nobody is asked while the addresses of the DNS Service are waited for: nothing is
// served before.
type nobody struct{}

// Exchange implements [resolver.Forwarder].
func (nobody) Exchange(context.Context, upstream.Question) (upstream.Answer, error) {
	return upstream.Answer{}, &upstream.Error{Reason: upstream.NoServers}
}

// followService has the forwarder ask the addresses that the cluster's DNS
// Service has now. The error is one that would have ended a start with these
// addresses, where they were waited for.
func (d *daemon) followService(ctx context.Context) error {
	cfg := d.config()
	if !usesService(cfg) || slices.Equal(d.clusterIPs(), d.serviceInUse()) {
		return nil
	}
	waited := d.upstream() == nil
	if waited {
		d.log.Info("the DNS Service's addresses are known", "addresses", d.clusterIPs())
	} else {
		d.log.Info("the DNS Service has other addresses", "addresses", d.clusterIPs())
	}
	err := d.apply(ctx, cfg)
	switch {
	case err == nil:
		kick(d.reloaded)
	case !waited:
		d.log.Error("the DNS Service's old addresses stay in use", "error", err)
		err = nil
	}
	return err
}

// retire closes a forwarder and keeps its counts.
func (d *daemon) retire(f *upstream.Forwarder) {
	if err := f.Close(); err != nil {
		d.log.Warn("closing an old forwarder", "error", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leaving = slices.DeleteFunc(d.leaving, func(l *upstream.Forwarder) bool { return l == f })
	d.retired = addUpstream(d.retired, f.Stats())
}
