package config

import (
	"flag"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares got with the file at path, or writes it there with -update.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s differs, -update rewrites it (-file +now):\n%s", path, diff)
	}
}

// equal compares configurations, addresses and prefixes included.
func equal(t *testing.T, want, got *Config) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

func parse(t *testing.T, file string, args ...string) *Config {
	t.Helper()
	c, err := Parse("test.yaml", []byte(file), parseFlags(t, args...))
	if err != nil {
		t.Fatalf("unexpected problems:\n%v", err)
	}
	return c
}

func parseFlags(t *testing.T, args ...string) *Flags {
	t.Helper()
	fs := flag.NewFlagSet("test", flag.ContinueOnError)
	flags := RegisterFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return flags
}

func TestDefault(t *testing.T) {
	standalone, err := Load("", nil)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/default.yaml", Default().String())
	golden(t, "testdata/standalone.yaml", standalone.String())
}

func TestDefaultsOfSources(t *testing.T) {
	complete, err := Load("testdata/complete.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	standalone, err := Load("", nil)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		file string
		want *Config
	}{
		{"every key written out", complete.String(), Default()},
		{"empty file", "", Default()},
		{"only comments", "# nothing\n\n# here\n", Default()},
		{"empty document", "---\n", Default()},
		{"empty mapping", "{}", Default()},
		{"no Kubernetes", "kubernetes: {source: none}", standalone},
	}
	equal(t, Default(), complete)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { equal(t, test.want, parse(t, test.file)) })
	}
}

func TestGuardFollowsDNSService(t *testing.T) {
	coredns, stub := ServiceName{"dns", "coredns"}, ServiceName{"dns", "stub"}
	for name, test := range map[string]struct {
		file  string
		flags []string
		want  []ServiceName
	}{
		"by default":           {"", nil, []ServiceName{{"kube-system", "kube-dns"}}},
		"file":                 {"kubernetes: {dnsService: dns/coredns}", nil, []ServiceName{coredns}},
		"flag":                 {"", []string{"--kubernetes.dnsService=dns/coredns"}, []ServiceName{coredns}},
		"flag over file":       {"kubernetes: {dnsService: dns/stub}", []string{"--kubernetes.dnsService=dns/coredns"}, []ServiceName{coredns}},
		"a list stays":         {"kubernetes: {dnsService: dns/coredns}\nguard: {services: [dns/stub]}", nil, []ServiceName{stub}},
		"a list, by flag":      {"kubernetes: {dnsService: dns/coredns}", []string{"--guard.services=dns/stub"}, []ServiceName{stub}},
		"other keys of guard":  {"kubernetes: {dnsService: dns/coredns}\nguard: {resync: 1m}", nil, []ServiceName{coredns}},
		"without a Kubernetes": {"kubernetes: {source: none, dnsService: dns/coredns}", nil, []ServiceName{coredns}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parse(t, test.file, test.flags...).Guard.Services); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestRunWithoutFile(t *testing.T) {
	c, err := Load("", parseFlags(t, "--listen", "127.0.0.1:5353"))
	if err != nil {
		t.Fatal(err)
	}
	if c.Kubernetes.Source != SourceNone || c.Guard.Enabled || c.Intercept.Mode != InterceptNone {
		t.Errorf("source %s, guard %v, intercept %s; want none of them", c.Kubernetes.Source, c.Guard.Enabled, c.Intercept.Mode)
	}
	want := []Upstream{{Zones: []string{"."}, Servers: []Server{{File: "/etc/resolv.conf"}}, Protocol: ProtocolAuto}}
	if diff := cmp.Diff(want, c.Upstreams, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Errorf("upstreams (-want +got):\n%s", diff)
	}
	if want := netip.MustParseAddrPort("127.0.0.1:5353"); len(c.Listen) != 1 || c.Listen[0] != want {
		t.Errorf("listen %v, want %v", c.Listen, want)
	}
}

// TestFields reads a value other than the default into every field.
func TestFields(t *testing.T) {
	got := parse(t, `
listen: [127.0.0.1, "[::1]:5353", fd53:dd:20::10, "::ffff:10.0.0.1"]
control: /tmp/control.sock
http: "[::1]:8080"
clusterDomain: K8s.Example.
kubernetes:
  source: file
  file: objects.yaml
  nodeName: node-1.example
  dnsService: dns/coredns
intercept:
  mode: none
  backend: iptables
  mark: 0x300
  table: 100
  rulePriority: 2
  zone: 7
  aliveTimeout: 2s
  exclude: [10.0.0.0/8, fd00::/8, 192.0.2.1]
upstreams:
  - zones: [Corp.Example., consul]
    servers: [10.1.2.3, "10.1.2.4:5300", "[fd00::1]:53", fd00::2]
    protocol: tcp
  - servers: [service, /run/resolv.conf]
timeouts: {hedge: 100ms, retry: 500ms, stale: 1s, total: 2s}
budget: {hedge: 0, retry: 20}
cache:
  size: 1Gi
  zones:
    ".": {positive: 2h}
    corp.example: {positive: 1m, stale: 0s}
    a.Corp.Example: {negative: 1s}
    k8s.example: {negative: 1s}
  prefetch: false
search:
  collapse: false
  expand: true
  ndots: 2
  domains: [Example.Org.]
  types: [a, HTTPS]
aaaa: nodata
guard:
  enabled: false
  services: [dns/coredns, dns/stub]
  dryRun: true
  evidence: true
  resync: 1m
limits: {inFlight: 10, inFlightPerClient: 9, tcpConnections: 8, tcpConnectionsPerClient: 7, readers: 6}
log: {level: debug, format: text}
`)
	want := &Config{
		Listen: []netip.AddrPort{
			netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("[::1]:5353"),
			netip.MustParseAddrPort("[fd53:dd:20::10]:53"), netip.MustParseAddrPort("10.0.0.1:53"),
		},
		Control:       "/tmp/control.sock",
		HTTP:          "[::1]:8080",
		ClusterDomain: "k8s.example",
		Kubernetes: Kubernetes{
			Source: SourceFile, File: "objects.yaml", NodeName: "node-1.example",
			DNSService: ServiceName{"dns", "coredns"},
		},
		Intercept: Intercept{
			Mode: InterceptNone, Backend: BackendIPTables, Mark: 0x300, Table: 100,
			RulePriority: 2, Zone: 7, AliveTimeout: 2 * time.Second,
			Exclude: []netip.Prefix{
				netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("192.0.2.1/32"),
			},
		},
		Upstreams: []Upstream{
			{
				Zones: []string{"corp.example", "consul"},
				Servers: []Server{
					{Addr: netip.MustParseAddrPort("10.1.2.3:53")},
					{Addr: netip.MustParseAddrPort("10.1.2.4:5300")},
					{Addr: netip.MustParseAddrPort("[fd00::1]:53")},
					{Addr: netip.MustParseAddrPort("[fd00::2]:53")},
				},
				Protocol: ProtocolTCP,
			},
			{Zones: []string{"."}, Servers: []Server{{Service: true}, {File: "/run/resolv.conf"}}, Protocol: ProtocolAuto},
		},
		Timeouts: Timeouts{Hedge: 100 * time.Millisecond, Retry: 500 * time.Millisecond, Stale: time.Second, Total: 2 * time.Second},
		Budget:   Budget{Hedge: 0, Retry: 20},
		Cache: Cache{
			Size: Gi,
			Zones: []CacheZone{
				{Name: ".", Positive: 2 * time.Hour, Negative: 5 * time.Minute, Stale: time.Hour},
				{Name: "a.corp.example", Positive: time.Minute, Negative: time.Second, Stale: 0},
				{Name: "corp.example", Positive: time.Minute, Negative: 5 * time.Minute, Stale: 0},
				{Name: "k8s.example", Positive: 30 * time.Second, Negative: time.Second, Stale: 5 * time.Minute},
			},
		},
		Search: Search{Expand: true, NDots: 2, Domains: []string{"example.org"}, Types: []RRType{TypeA, TypeHTTPS}},
		AAAA:   AAAANoData,
		Guard: Guard{
			Services: []ServiceName{{"dns", "coredns"}, {"dns", "stub"}},
			DryRun:   true, Evidence: true, Resync: time.Minute,
		},
		Limits: Limits{InFlight: 10, InFlightPerClient: 9, TCPConnections: 8, TCPConnectionsPerClient: 7, Readers: 6},
		Log:    Log{Level: -4, Format: LogText},
	}
	equal(t, want, got)
	equal(t, want, parse(t, got.String()))
}

// TestKubeconfig is the field that TestFields cannot set beside the others.
func TestKubeconfig(t *testing.T) {
	if got := parse(t, "kubernetes: {kubeconfig: /root/.kube/config}").Kubernetes.Kubeconfig; got != "/root/.kube/config" {
		t.Errorf("kubeconfig %q", got)
	}
}

// TestKeysCoverConfig holds the key table against the Config type: every field
// has one key, in the field's place and under the field's name.
func TestKeysCoverConfig(t *testing.T) {
	c := new(Config)
	byField := make(map[uintptr]string)
	keys(c).leaves(func(path string, k key) {
		at := reflect.ValueOf(k.value).FieldByName("at").Pointer()
		if other, ok := byField[at]; ok {
			t.Errorf("%s and %s set the same field", path, other)
		}
		byField[at] = path
		if k.meaning == "" {
			t.Errorf("%s has no meaning", path)
		}
	})
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		for i := range v.NumField() {
			field, name := v.Field(i), join(path, v.Type().Field(i).Name)
			if got, ok := byField[field.Addr().Pointer()]; ok && strings.EqualFold(got, name) {
				delete(byField, field.Addr().Pointer())
				continue
			}
			if field.Kind() != reflect.Struct {
				t.Errorf("no key sets Config.%s", name)
				continue
			}
			walk(field, name)
		}
	}
	walk(reflect.ValueOf(c).Elem(), "")
	for _, path := range byField {
		t.Errorf("%s sets no field of that name", path)
	}
}

func TestHash(t *testing.T) {
	base := parse(t, "cache: {size: 8Mi}\naaaa: nodata\n").Hash()
	if len(base) != 16 || strings.Trim(base, "0123456789abcdef") != "" {
		t.Errorf("hash %q is not 16 hexadecimal digits", base)
	}
	same := map[string]*Config{
		"comment and order":  parse(t, "# hello\naaaa: nodata\ncache:\n  size: 8192Ki\n"),
		"flags":              parse(t, "", "--cache.size=8388608", "--aaaa=nodata"),
		"defaults written":   parse(t, "cache: {size: 8Mi, prefetch: true}\naaaa: nodata\nlisten: ['169.254.20.10:53']\n"),
		"its own text":       parse(t, parse(t, "cache: {size: 8Mi}\naaaa: nodata\n").String()),
		"zone caps as given": parse(t, "cache: {size: 8Mi, zones: {Cluster.Local.: {stale: 5m}}}\naaaa: nodata\n"),
	}
	for name, c := range same {
		if got := c.Hash(); got != base {
			t.Errorf("%s: hash %s, want %s", name, got, base)
		}
	}
	if got := parse(t, "cache: {size: 9Mi}\naaaa: nodata\n").Hash(); got == base {
		t.Error("another cache size has the same hash")
	}
}
