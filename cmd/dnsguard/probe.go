package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/search"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// How the daemon watches itself.
const (
	probeInterval = 5 * time.Second
	probeTimeout  = time.Second
	// firstAnswerRetry is how soon the upstreams are asked again before
	// the first of them has answered.
	firstAnswerRetry = time.Second
)

// probeName is the qname of our own probes. ".invalid" never exists (RFC 6761
// section 6.4); the question for ANY is answered without an upstream.
var probeName = []byte("\x08dnsguard\x07invalid\x00") //nolint:gochecknoglobals // a constant

// probeEndpoints asks every endpoint a question over UDP, as a client would,
// and keeps the conditions, until ctx ends.
func (d *daemon) probeEndpoints(ctx context.Context) {
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		d.kubeReadiness()
		// Intercepted addresses are probed by the interception itself: from
		// here, a query to them would take the clients' way, wherever it leads.
		addrs := d.listening()
		if d.config().Intercept.Mode != config.InterceptNone {
			addrs = nil
		}
		for _, addr := range addrs {
			text := ""
			if err := probe(ctx, addr); err != nil && ctx.Err() == nil {
				text = err.Error()
			}
			d.conditions.notReady("listen "+addr.String(), text)
		}
		select {
		case <-ticker.C:
		case <-d.relisten: // the endpoints changed
		case <-ctx.Done():
			return
		}
	}
}

// probe asks one address.
func probe(ctx context.Context, addr netip.AddrPort) error {
	switch {
	case addr.Addr() == netip.IPv4Unspecified():
		addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), addr.Port())
	case addr.Addr() == netip.IPv6Unspecified():
		addr = netip.AddrPortFrom(netip.IPv6Loopback(), addr.Port())
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", addr.String())
	if err != nil {
		return fmt.Errorf("ask it: %w", err)
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	var id [2]byte
	_, _ = rand.Read(id[:]) // never fails
	query := dnswire.AppendQuery(nil, binary.BigEndian.Uint16(id[:]), dnswire.FlagRD, probeName, dnswire.TypeANY, dnswire.ClassIN, nil)
	if _, err := conn.Write(query); err != nil {
		return fmt.Errorf("ask it: %w", err)
	}
	buf := make([]byte, dnswire.MinUDPSize)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return fmt.Errorf("no answer to our own query: %w", err)
		}
		if n >= dnswire.HeaderLen && [2]byte(buf[:2]) == id {
			return nil
		}
	}
}

// How a reader that stands still is told from one that works.
const (
	watchdogInterval = 250 * time.Millisecond
	watchdogLimit    = time.Second
)

// watchdog closes the sockets of readers that stand still, until ctx ends.
func (d *daemon) watchdog(ctx context.Context) {
	ticker := time.NewTicker(watchdogInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if n := d.resolver.CloseStuck(watchdogLimit); n > 0 {
				d.log.Error("readers stand still; their sockets are closed, the others go on", "readers", n)
			}
		case <-ctx.Done():
			return
		}
	}
}

// upstreamHeard is the condition that an upstream has answered.
const upstreamHeard = "upstream"

// awaitUpstream asks the upstreams until one has answered: before, queries are
// better off elsewhere. Any answer will do, an error too. The cluster's DNS shows
// with it whether it has the cluster's domain. While nobody can be asked since the
// addresses of the DNS Service are not known, it says so.
func (d *daemon) awaitUpstream(ctx context.Context) {
	logged := ""
	for {
		settled, err := d.askFirst(ctx)
		if err == nil {
			d.conditions.notReady(upstreamHeard, "")
			close(d.heard)
			d.watchDomain(ctx, settled)
			return
		}
		if ctx.Err() != nil {
			return
		}
		if isServiceUnknown(err) {
			d.conditions.notReady(upstreamHeard, "waiting: "+err.Error())
			if logged != err.Error() {
				logged = err.Error()
				d.log.Info("waiting", "reason", logged)
			}
		} else {
			d.conditions.notReady(upstreamHeard, "none has answered yet: "+err.Error()+d.nodeLocalHint())
		}
		select {
		case <-time.After(firstAnswerRetry):
		case <-d.reloaded:
		case <-ctx.Done():
			return
		}
	}
}

// askFirst asks what any upstream can answer. The cluster's DNS answers for its
// own zone whatever has become of the world outside. settled tells that the
// cluster's domain is not in doubt.
func (d *daemon) askFirst(ctx context.Context) (settled bool, err error) {
	q := upstream.Question{Name: []byte{0}, Type: dnswire.TypeNS, Class: dnswire.ClassIN}
	domain := ""
	if cfg := d.config(); usesService(cfg) {
		if zone, err := search.WireName(cfg.ClusterDomain); err == nil {
			q.Name, q.Type, domain = zone, dnswire.TypeSOA, cfg.ClusterDomain
		}
	}
	forwarder := d.upstream()
	if forwarder == nil {
		return false, d.serviceUnknown(d.config())
	}
	ans, err := forwarder.Exchange(ctx, q)
	if err != nil {
		return false, err
	}
	text := ""
	if domain != "" {
		text = domainProblem(domain, ans.Response.Rcode)
	}
	if d.conditions.warn("clusterDomain", text) && text != "" {
		d.log.Warn("clusterDomain may be wrong", "server", ans.Server, "problem", text)
	}
	return text == "", nil
}

// domainProblem tells that an answer to the question for the SOA of the cluster's
// domain denies that there is such a domain, or the server's duty for it. Other
// errors may be those of a server that is starting.
func domainProblem(domain string, rcode uint16) string {
	if rcode != dnswire.RcodeNXDomain && rcode != dnswire.RcodeRefused {
		return ""
	}
	return fmt.Sprintf("its DNS says %s to the SOA of %s: is that the cluster's domain? With a wrong one search lists are not finished, and Services get the caps of public names",
		dns.RcodeToString[int(rcode)], domain)
}

// domainRecheck is how often a cluster domain in doubt is asked for again.
const domainRecheck = 30 * time.Second

// watchDomain keeps the warning of the cluster's domain until ctx ends: it asks
// again after a reload, and while the domain is in doubt.
func (d *daemon) watchDomain(ctx context.Context, settled bool) {
	for {
		var again <-chan time.Time
		if !settled {
			again = time.After(domainRecheck)
		}
		select {
		case <-again:
		case <-d.reloaded:
		case <-ctx.Done():
			return
		}
		settled, _ = d.askFirst(ctx) // without an answer it is asked again
	}
}
