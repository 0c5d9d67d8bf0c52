package iptables

import (
	"errors"
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestWithJumps(t *testing.T) {
	const text = "*raw\n:DNSGUARD-QUERY - [0:0]\nCOMMIT\n"
	const query, reply = "-A PREROUTING -j DNSGUARD-QUERY\n", "-A OUTPUT -j DNSGUARD-REPLY\n"
	for name, tc := range map[string]struct{ saved, extra string }{
		"none there":     {"*raw\nCOMMIT\n", "-I PREROUTING 1 -j DNSGUARD-QUERY\n-I OUTPUT 1 -j DNSGUARD-REPLY\n"},
		"both there":     {"*raw\n" + query + reply + "COMMIT\n", ""},
		"one is missing": {"*raw\n" + query + "COMMIT\n", "-I OUTPUT 1 -j DNSGUARD-REPLY\n"},
		"one is tripled": {"*raw\n" + query + query + reply + query + "COMMIT\n", "-D PREROUTING -j DNSGUARD-QUERY\n-D PREROUTING -j DNSGUARD-QUERY\n"},
		"another slot's": {"*raw\n-A PREROUTING -j DNSGUARD-1-QUERY\n" + reply + "COMMIT\n", "-I PREROUTING 1 -j DNSGUARD-QUERY\n"},
		"with a match":   {"*raw\n-A PREROUTING -i eth0 -j DNSGUARD-QUERY\n" + reply + "COMMIT\n", "-I PREROUTING 1 -j DNSGUARD-QUERY\n"},
	} {
		t.Run(name, func(t *testing.T) {
			want := strings.TrimSuffix(text, "COMMIT\n") + tc.extra + "COMMIT\n"
			if diff := cmp.Diff(want, chainsOf(0).withJumps(text, tc.saved)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRemoval(t *testing.T) {
	saved := `*raw
:PREROUTING ACCEPT [0:0]
:DNSGUARD-QUERY - [0:0]
:DNSGUARD-1-QUERY - [0:0]
:cali-PREROUTING - [0:0]
-A PREROUTING -j cali-PREROUTING
-A PREROUTING -j DNSGUARD-QUERY
-A PREROUTING -j DNSGUARD-1-QUERY
-A DNSGUARD-QUERY -j DNSGUARD-1-QUERY
COMMIT
`
	want := `*raw
:DNSGUARD-QUERY - [0:0]
:DNSGUARD-1-QUERY - [0:0]
-D PREROUTING -j DNSGUARD-QUERY
-D PREROUTING -j DNSGUARD-1-QUERY
-X DNSGUARD-QUERY
-X DNSGUARD-1-QUERY
COMMIT
`
	if diff := cmp.Diff(want, removal(saved, func(string) bool { return false })); diff != "" {
		t.Errorf("all (-want +got):\n%s", diff)
	}
	if got := removal(saved, func(string) bool { return true }); got != "" {
		t.Errorf("keeping all: %q", got)
	}
	got := removal(saved, func(chain string) bool { return chain != "DNSGUARD-1-QUERY" })
	if strings.Contains(got, "-X DNSGUARD-QUERY") || !strings.Contains(got, "-X DNSGUARD-1-QUERY") {
		t.Errorf("keeping one:\n%s", got)
	}
}

func TestAliveSeconds(t *testing.T) {
	for timeout, want := range map[time.Duration]int{500 * time.Millisecond: 1, time.Second: 1, 1001 * time.Millisecond: 2, 2 * time.Second: 2} {
		rs := RuleSet{cfg: Config{AliveTimeout: timeout}}
		if got := rs.aliveSeconds(); got != want {
			t.Errorf("%v: %d s, want %d", timeout, got, want)
		}
	}
}

// TestXTProgramFails: an error of the program is the caller's, and nothing is
// taken for applied.
func TestXTProgramFails(t *testing.T) {
	broken := errors.New("lock")
	fail := false
	rs := mustRuleSet(t, withProbe(clusterIPConfig()))
	k, err := newXTKernel(func(name, stdin string, args ...string) (string, error) {
		if fail && strings.HasSuffix(name, "-restore") {
			return "", broken
		}
		return "iptables v1.8.9 (legacy)", nil
	}, rs)
	if err != nil || !k.legacy {
		t.Fatal(k, err)
	}
	fail = true
	for range 2 {
		if _, err := k.ensure(rs); !errors.Is(err, broken) {
			t.Errorf("ensure: %v", err)
		}
	}
	if _, err := newXTKernel(func(string, string, ...string) (string, error) { return "", fs.ErrNotExist }, rs); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
}

func TestKeys(t *testing.T) {
	for _, s := range []Service{{vip4, UDP}, {vip6, TCP}, {netip.MustParseAddrPort("192.0.2.1:5353"), TCP}} {
		c, port, ok := parseKey(serviceKey(s))
		if got := (Service{netip.AddrPortFrom(c.Addr, port), c.Proto}); got != s || !ok {
			t.Errorf("%v came back as %v, %v", s, got, ok)
		}
		client := Client{s.Addr.Addr(), s.Proto}
		if got, _, ok := parseKey(clientKey(client)); got != client || !ok {
			t.Errorf("%v came back as %v, %v", client, got, ok)
		}
	}
	for n := range 8 {
		if c, _, ok := parseKey(make([]byte, n)); ok {
			t.Errorf("a key of %d octets was read as %v", n, c)
		}
	}
}

func TestAfter(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8": "11.0.0.0", "10.1.2.3/32": "10.1.2.4", "10.0.0.128/25": "10.0.1.0",
		"fd00::/64": "fd00:0:0:1::", "0.0.0.0/0": "", "255.255.255.255/32": "", "::/0": "",
	} {
		got, ok := after(netip.MustParsePrefix(in))
		if ok != (want != "") || ok && got != netip.MustParseAddr(want) {
			t.Errorf("after %s: %v, %v; want %s", in, got, ok, want)
		}
	}
}

func TestDurationText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Second: "1s", 1500 * time.Millisecond: "1s500ms", 5 * time.Minute: "5m", 500 * time.Millisecond: "500ms", 90 * time.Minute: "1h30m",
	} {
		if got := durationText(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}
