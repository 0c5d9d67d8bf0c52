package config

// A KubernetesSource says where the cluster's objects are read.
type KubernetesSource string

// The sources of kubernetes.source.
const (
	SourceAPI  KubernetesSource = "api"
	SourceFile KubernetesSource = "file"
	SourceNone KubernetesSource = "none"
)

// An InterceptMode says which addresses we take queries for.
type InterceptMode string

// The modes of intercept.mode.
const (
	InterceptNone      InterceptMode = "none"
	InterceptLinkLocal InterceptMode = "link-local"
	InterceptClusterIP InterceptMode = "cluster-ip"
)

// An InterceptBackend says by which kernel interface the rules are set.
type InterceptBackend string

// The backends of intercept.backend.
const (
	BackendAuto     InterceptBackend = "auto"
	BackendNFTables InterceptBackend = "nftables"
	BackendIPTables InterceptBackend = "iptables"
)

// A Protocol says how an upstream is asked.
type Protocol string

// The protocols of upstreams[].protocol.
const (
	ProtocolAuto Protocol = "auto"
	ProtocolUDP  Protocol = "udp"
	ProtocolTCP  Protocol = "tcp"
)

// An AAAAPolicy says what becomes of questions for IPv6 addresses.
type AAAAPolicy string

// The policies of aaaa.
const (
	AAAAPass   AAAAPolicy = "pass"
	AAAANoData AAAAPolicy = "nodata"
)

// A LogFormat says how log records are written.
type LogFormat string

// The formats of log.format.
const (
	LogAuto LogFormat = "auto"
	LogJSON LogFormat = "json"
	LogText LogFormat = "text"
)
