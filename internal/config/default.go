package config

import (
	"log/slog"
	"net/netip"
	"time"
)

const (
	defaultClusterDomain = "cluster.local"
	// defaultResolvConf is the root zone's upstream where there is no cluster.
	defaultResolvConf = "/etc/resolv.conf"
)

// Default returns the configuration that an empty file gives.
func Default() *Config { return defaults(SourceAPI, defaultClusterDomain, defaultDNSService()) }

// defaultDNSService is the name that kubeadm gives the Service, whatever serves.
func defaultDNSService() ServiceName { return ServiceName{Namespace: "kube-system", Name: "kube-dns"} }

// defaults returns the configuration in which only the three keys that others
// depend on have been set.
func defaults(source KubernetesSource, clusterDomain string, dnsService ServiceName) *Config {
	return &Config{
		Listen:        []netip.AddrPort{netip.MustParseAddrPort("169.254.20.10:53")},
		Control:       "/run/dnsguard/control.sock",
		HTTP:          ":9253",
		ClusterDomain: clusterDomain,
		Kubernetes: Kubernetes{
			Source:     source,
			DNSService: dnsService,
		},
		Intercept: Intercept{
			Mode:         InterceptNone,
			Backend:      BackendAuto,
			Mark:         0x30,
			Table:        5353,
			RulePriority: 1,
			Zone:         5353,
			AliveTimeout: time.Second,
		},
		Upstreams: []Upstream{rootUpstream(source)},
		Timeouts: Timeouts{
			Retry: 700 * time.Millisecond,
			Stale: 1200 * time.Millisecond,
			Total: 1500 * time.Millisecond,
		},
		Budget: Budget{Hedge: 5, Retry: 10},
		Cache: Cache{
			Size: 32 * Mi,
			Zones: []CacheZone{
				{Name: ".", Positive: time.Hour, Negative: 5 * time.Minute, Stale: time.Hour},
				{Name: clusterDomain, Positive: 30 * time.Second, Negative: 2 * time.Second, Stale: 5 * time.Minute},
			},
			Prefetch: true,
		},
		Search: Search{
			Collapse: true,
			NDots:    5,
			Types:    []RRType{TypeA, TypeAAAA},
		},
		AAAA: AAAAPass,
		Guard: Guard{
			Enabled:  source != SourceNone,
			Services: []ServiceName{dnsService},
			Resync:   30 * time.Second,
		},
		Limits: Limits{
			InFlight:                5000,
			InFlightPerClient:       500,
			TCPConnections:          1000,
			TCPConnectionsPerClient: 100,
		},
		Log: Log{Level: slog.LevelInfo, Format: LogAuto},
	}
}

// rootUpstream returns who answers for every zone that has no upstream of its own.
func rootUpstream(source KubernetesSource) Upstream {
	server := Server{Service: true}
	if source == SourceNone {
		server = Server{File: defaultResolvConf}
	}
	return Upstream{Zones: []string{"."}, Servers: []Server{server}, Protocol: ProtocolAuto}
}
