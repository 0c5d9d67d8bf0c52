package config

import (
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"net/netip"
	"time"

	"go.yaml.in/yaml/v3"
)

// A Config is the whole configuration of a dnsguard process. Its shape is that
// of the YAML file; what each key means is told once, by [Reference]. The field
// comments here add only what a Go caller has to know.
type Config struct {
	Listen        []netip.AddrPort
	Control       string
	HTTP          string // as net.Listen takes it; empty: no HTTP server
	ClusterDomain string // folded, no trailing dot
	Kubernetes    Kubernetes
	Intercept     Intercept
	Upstreams     []Upstream // between them every zone once, "." included
	Timeouts      Timeouts
	Budget        Budget
	Cache         Cache
	Search        Search
	AAAA          AAAAPolicy
	Guard         Guard
	Limits        Limits
	Log           Log
}

// Kubernetes says where Services, EndpointSlices, Pods and Namespaces come from.
type Kubernetes struct {
	Source     KubernetesSource
	File       string // set exactly when Source is SourceFile
	Kubeconfig string // empty: in-cluster
	NodeName   string // empty: the caller asks the environment
	DNSService ServiceName
}

// Intercept says how queries reach us that were sent to somebody else.
type Intercept struct {
	Mode         InterceptMode
	Backend      InterceptBackend
	Mark         Mark
	Table        uint32
	RulePriority int
	Zone         uint16
	AliveTimeout time.Duration
	Exclude      []netip.Prefix // masked
}

// An Upstream says who answers for some zones.
type Upstream struct {
	Zones    []string // folded, no trailing dot; "." is the root
	Servers  []Server
	Protocol Protocol
}

// Timeouts say when a query that waits for an upstream is helped along.
type Timeouts struct {
	Hedge time.Duration // 0: auto, from the measured round-trip time
	Retry time.Duration
	Stale time.Duration
	Total time.Duration
}

// Budget bounds what we add to an upstream's load, in per cent of recent queries.
type Budget struct {
	Hedge int
	Retry int
}

// Cache sizes the cache and caps what it keeps.
type Cache struct {
	Size     ByteSize
	Zones    []CacheZone // sorted by name, "." included
	Prefetch bool
}

// A CacheZone caps the lifetimes of a zone's answers; the longest zone that
// holds a name wins.
type CacheZone struct {
	Name     string // folded, no trailing dot; "." is the root
	Positive time.Duration
	Negative time.Duration
	Stale    time.Duration
}

// Search says which search-list walks we finish for a client.
type Search struct {
	Collapse bool
	Expand   bool
	NDots    int
	Domains  []string // folded, no trailing dot
	Types    []RRType
}

// Guard says which Services' flows are kept free of endpoints that are gone.
type Guard struct {
	Enabled  bool
	Services []ServiceName
	DryRun   bool
	Evidence bool
	Resync   time.Duration
}

// Limits bounds the work that we take on.
type Limits struct {
	InFlight                int
	InFlightPerClient       int
	TCPConnections          int
	TCPConnectionsPerClient int
	Readers                 int // 0: the caller takes min(GOMAXPROCS, 4)
}

// Log says what is logged and how.
type Log struct {
	Level  slog.Level
	Format LogFormat
}

// String returns the configuration as a file that would give it again, every
// key written out.
func (c *Config) String() string {
	text, err := yaml.Marshal(keys(c).encode())
	if err != nil {
		// The nodes are our own and hold plain scalars only.
		panic("config: " + err.Error())
	}
	return string(text)
}

// Hash returns 16 hexadecimal digits that stand for the configuration. They are
// the same for equal configurations, however each came about: by file, by flags
// or by default, with other comments or with its keys in another order.
func (c *Config) Hash() string {
	sum := sha256.Sum256([]byte(c.String()))
	return hex.EncodeToString(sum[:8])
}
