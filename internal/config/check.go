package config

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// check reports what keys that are right by themselves get wrong together.
func (d *decoder) check(c *Config) {
	d.checkKubernetes(c)
	d.checkIntercept(c)
	d.checkListen(c)
	d.checkUpstreams(c)
	d.checkTimeouts(c.Timeouts)
	d.checkSearch(c)
	d.checkGuard(c)
	d.checkPerClient("limits.inFlight", c.Limits.InFlight, c.Limits.InFlightPerClient)
	d.checkPerClient("limits.tcpConnections", c.Limits.TCPConnections, c.Limits.TCPConnectionsPerClient)
}

// sourceIs says what kubernetes.source is, and why if nobody wrote it.
func (d *decoder) sourceIs(source KubernetesSource) string {
	text := "kubernetes.source is " + string(source)
	switch {
	case d.given("kubernetes.source"):
		return text
	case source == SourceNone:
		return text + " (the default without a file)"
	}
	return text + " (the default)"
}

func (d *decoder) noKubernetes() string { return d.sourceIs(SourceNone) }

func (d *decoder) checkKubernetes(c *Config) {
	k := c.Kubernetes
	if k.Source == SourceFile && k.File == "" {
		d.refuse("is file, but kubernetes.file is empty",
			"api, none, or a path in kubernetes.file", "kubernetes.source", "kubernetes.file")
	}
	// A file that is named and not read is a mistake to find now, not when the
	// cluster seems empty.
	if k.Source != SourceFile && k.File != "" {
		d.refuse(quote(k.File)+" is not read: "+d.sourceIs(k.Source),
			"a path only with kubernetes.source file", "kubernetes.file", "kubernetes.source")
	}
	if k.Source != SourceAPI && k.Kubeconfig != "" {
		d.refuse(quote(k.Kubeconfig)+" is not read: "+d.sourceIs(k.Source),
			"a path only with kubernetes.source api", "kubernetes.kubeconfig", "kubernetes.source")
	}
}

func (d *decoder) checkIntercept(c *Config) {
	if c.Intercept.Mode == InterceptClusterIP && c.Kubernetes.Source == SourceNone {
		d.refuse("is cluster-ip, but "+d.noKubernetes()+", so nothing tells the ClusterIPs",
			"none or link-local, or kubernetes.source api or file", "intercept.mode", "kubernetes.source")
	}
}

func (d *decoder) checkListen(c *Config) {
	if len(c.Listen) == 0 && c.Intercept.Mode != InterceptClusterIP {
		d.refuse(fmt.Sprintf("is empty with intercept.mode %s", c.Intercept.Mode),
			"at least one address, or intercept.mode cluster-ip", "listen", "intercept.mode")
	}
	for i, a := range c.Listen {
		at := element("listen", i)
		if c.Intercept.Mode != InterceptNone {
			// resolv.conf has no place for a port, nor for a zone that is not the
			// client's own.
			if a.Port() != dnsPort {
				d.refuse(fmt.Sprintf("is %v, but pods send to port 53 and so no query would be intercepted", a),
					"port 53, or intercept.mode none", at, "intercept.mode")
			}
			if a.Addr().IsUnspecified() {
				d.refuse(fmt.Sprintf("is %v: what is intercepted are single addresses", a),
					"one address, or intercept.mode none", at, "intercept.mode")
			}
			if a.Addr().Zone() != "" {
				d.refuse(fmt.Sprintf("is %v: an intercepted address is on no interface", a),
					"an address without %, or intercept.mode none", at, "intercept.mode")
			}
		}
		if overlaps(c.HTTP, a) {
			d.conflict(
				side{at, fmt.Sprintf("%v is bound by http (%q) as well", a, c.HTTP), "another port"},
				side{"http", fmt.Sprintf("%q is bound by %s (%v) as well", c.HTTP, at, a), "another port"},
			)
		}
	}
}

// overlaps reports whether binding http takes the TCP side of a.
func overlaps(http string, a netip.AddrPort) bool {
	host, port, err := net.SplitHostPort(http)
	if err != nil || port != strconv.Itoa(int(a.Port())) {
		return false
	}
	addr, err := netip.ParseAddr(host)
	return err != nil || addr.IsUnspecified() || a.Addr().IsUnspecified() || addr.Unmap() == a.Addr()
}

func (d *decoder) checkUpstreams(c *Config) {
	first := make(map[string]string)
	for i, u := range c.Upstreams {
		at := element("upstreams", i)
		for j, zone := range u.Zones {
			at := element(at+".zones", j)
			if other, ok := first[zone]; ok {
				name := fmt.Sprintf("%q", zone)
				if !d.given(at) {
					name += " (the default)"
				}
				d.refuse(fmt.Sprintf("%s has servers already (%s)", name, other), "each zone in one entry", at)
				continue
			}
			first[zone] = at
		}
		for j, s := range u.Servers {
			at := element(at+".servers", j)
			if s.Service && c.Kubernetes.Source == SourceNone {
				d.refuse("is service, but "+d.noKubernetes(),
					"an absolute path or IP[:port], or kubernetes.source api or file", at, "kubernetes.source")
			}
			if k := slices.Index(c.Listen, s.Addr); k >= 0 {
				d.refuse(fmt.Sprintf("is %v, where we listen ourselves (%s): queries would go in a circle", s.Addr, element("listen", k)),
					"another server", at, element("listen", k))
			}
		}
	}
}

func (d *decoder) checkTimeouts(t Timeouts) {
	type step struct {
		path string
		at   time.Duration
	}
	steps := []step{
		{"timeouts.hedge", t.Hedge}, // auto is 0: always early enough
		{"timeouts.retry", t.Retry},
		{"timeouts.stale", t.Stale},
		{"timeouts.total", t.Total},
	}
	order := fmt.Sprintf("hedge < retry < stale < total (now %s, %s, %s, %s)",
		formatHedge(t.Hedge), formatDuration(t.Retry), formatDuration(t.Stale), formatDuration(t.Total))
	for i, later := range steps[1:] {
		if earlier := steps[i]; earlier.at >= later.at {
			d.conflict(
				side{earlier.path, fmt.Sprintf("%s is not before %s (%s)", formatDuration(earlier.at), later.path, formatDuration(later.at)), order},
				side{later.path, fmt.Sprintf("%s is not after %s (%s)", formatDuration(later.at), earlier.path, formatDuration(earlier.at)), order},
			)
		}
	}
}

func (d *decoder) checkSearch(c *Config) {
	own := []string{"svc." + c.ClusterDomain, c.ClusterDomain}
	for i, domain := range c.Search.Domains {
		if slices.Contains(own, domain) {
			d.refuse(fmt.Sprintf("%q is searched anyway, before these", domain),
				"the domains of the node, without those of the cluster", element("search.domains", i), "clusterDomain")
		}
	}
}

func (d *decoder) checkGuard(c *Config) {
	if c.Guard.Enabled && c.Kubernetes.Source == SourceNone {
		d.refuse("is true, but "+d.noKubernetes()+", so nothing tells which endpoints serve",
			"false, or kubernetes.source api or file", "guard.enabled", "kubernetes.source")
	}
	if c.Guard.Enabled && len(c.Guard.Services) == 0 {
		d.refuse("is empty, but guard.enabled is true",
			"at least one Service, or guard.enabled false", "guard.services", "guard.enabled")
	}
	// Who turns the guard off may leave its settings; who sets them and has it
	// off by default expects it to run.
	if c.Guard.Enabled || d.given("guard.enabled") {
		return
	}
	for _, key := range []struct {
		path string
		set  bool
	}{{"guard.dryRun", c.Guard.DryRun}, {"guard.evidence", c.Guard.Evidence}} {
		if key.set {
			d.refuse("is true, but the guard is off because "+d.noKubernetes(),
				"false, or kubernetes.source api or file", key.path, "kubernetes.source")
		}
	}
}

func (d *decoder) checkPerClient(total string, all, one int) {
	if perClient := total + "PerClient"; one > all {
		d.conflict(
			side{perClient, fmt.Sprintf("%d is more than %s (%d)", one, total, all), "at most the total"},
			side{total, fmt.Sprintf("%d is less than %s (%d)", all, perClient, one), "at least as many as for one client"},
		)
	}
}
