package iptables

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestConfigErrors(t *testing.T) {
	addr := netip.MustParseAddrPort
	for name, tc := range map[string]struct {
		change func(*Config)
		key    string // empty: no error
		text   string
	}{
		"defaults":               {func(*Config) {}, "", ""},
		"one bit":                {func(c *Config) { c.Mark = 0x10 }, "intercept.mark", "0x10 has 1 bits set"},
		"three bits":             {func(c *Config) { c.Mark = 0x70 }, "intercept.mark", "0x70 has 3 bits set"},
		"bits apart":             {func(c *Config) { c.Mark = 0x80000001 }, "", ""},
		"a bit of kube-proxy":    {func(c *Config) { c.Mark = 0xc000 }, "intercept.mark", "kube-proxy"},
		"the local table":        {func(c *Config) { c.Table = 255 }, "intercept.table", "255"},
		"a negative table":       {func(c *Config) { c.Table = -1 }, "intercept.table", "-1"},
		"a negative priority":    {func(c *Config) { c.RulePriority = -1 }, "intercept.rulePriority", "-1"},
		"a short timeout":        {func(c *Config) { c.AliveTimeout = 499 * time.Millisecond }, "intercept.aliveTimeout", "at least 500ms"},
		"an unknown backend":     {func(c *Config) { c.Backend = "ipvs" }, "intercept.backend", `"ipvs"`},
		"no address":             {func(c *Config) { c.Addresses = nil }, "listen", "no address"},
		"port 0":                 {func(c *Config) { c.Addresses = []netip.AddrPort{addr("10.96.0.10:0")} }, "listen", "10.96.0.10:0"},
		"loopback":               {func(c *Config) { c.Addresses = []netip.AddrPort{addr("127.0.0.1:53")} }, "listen", "127.0.0.1"},
		"any address":            {func(c *Config) { c.Addresses = []netip.AddrPort{addr("[::]:53")} }, "listen", "[::]"},
		"a zone":                 {func(c *Config) { c.Addresses = []netip.AddrPort{addr("[fe80::1%eth0]:53")} }, "listen", "without zone"},
		"fe80::/10":              {func(c *Config) { c.Addresses = []netip.AddrPort{addr("[fe80::10]:53")} }, "listen", "fd53:dd:20::10"},
		"mapped":                 {func(c *Config) { c.Addresses = []netip.AddrPort{addr("[::ffff:10.96.0.10]:53")} }, "listen", "10.96.0.10"},
		"twice":                  {func(c *Config) { c.Addresses = []netip.AddrPort{vip4, vip4} }, "listen", "twice"},
		"two link-local":         {func(c *Config) { c.Addresses = []netip.AddrPort{link4, addr("169.254.20.11:53")} }, "listen", "169.254.20.11"},
		"two ports of one":       {func(c *Config) { c.Addresses = []netip.AddrPort{link4, addr("169.254.20.10:5353")} }, "", ""},
		"two ClusterIPs":         {func(c *Config) { c.ClusterIPs = append(c.ClusterIPs, netip.MustParseAddr("10.96.0.11")) }, "kubernetes.dnsService", "10.96.0.11"},
		"link-local without any": {func(c *Config) { c.Addresses, c.ClusterIPs = []netip.AddrPort{link4}, nil }, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			tc.change(&cfg)
			_, err := New(cfg)
			var ce *ConfigError
			if tc.key == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.As(err, &ce) || ce.Key != tc.key || !strings.Contains(err.Error(), tc.text) || ce.Remedy == "" {
				t.Errorf("%v, want key %s and %q", err, tc.key, tc.text)
			}
		})
	}
}

func TestConfigNeedsAProbe(t *testing.T) {
	cfg := testConfig()
	cfg.Probe = cfg.Probe[:11]
	if _, err := New(cfg); err == nil {
		t.Error("a probe that is no DNS message was taken")
	}
}

// TestSteady lists until the kernel says that nothing changed meanwhile.
func TestSteady(t *testing.T) {
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		answers []error
		want    error
		lists   int
	}{
		"at once":       {[]error{nil}, nil, 1},
		"the third":     {[]error{netlink.ErrDumpInterrupted, netlink.ErrDumpInterrupted, nil}, nil, 3},
		"never":         {slices.Repeat([]error{netlink.ErrDumpInterrupted}, 9), nil, 5},
		"another error": {[]error{netlink.ErrDumpInterrupted, broken}, broken, 2},
	} {
		t.Run(name, func(t *testing.T) {
			lists := 0
			got, err := steady(func() (int, error) {
				lists++
				return lists, tc.answers[lists-1]
			})
			if got != tc.lists || !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
				t.Errorf("list %d, %v; want %d, %v", got, err, tc.lists, tc.want)
			}
		})
	}
}

func TestMarkBits(t *testing.T) {
	for mark, want := range map[uint32][2]uint32{0x30: {0x10, 0x20}, 0x80000001: {1, 0x80000000}, 0x300: {0x100, 0x200}} {
		c := Config{Mark: mark}
		if got := [2]uint32{c.taken(), c.own()}; got != want {
			t.Errorf("bits of %#x: %#x, want %#x", mark, got, want)
		}
	}
}
