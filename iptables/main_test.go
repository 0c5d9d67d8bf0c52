package iptables

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares text with testdata/name.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
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
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// need finds a program that a test checks us against.
func need(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		labtest.Missing(t, err)
	}
	return path
}

// command runs a program inside a namespace and returns what it prints.
func command(t *testing.T, ns *lab.Namespace, stdin, name string, args ...string) string {
	t.Helper()
	out, err := tryCommand(t, ns, stdin, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

func tryCommand(t *testing.T, ns *lab.Namespace, stdin, name string, args ...string) (string, error) {
	t.Helper()
	path := need(t, name)
	var out bytes.Buffer
	err := ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), path, args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &out
		return cmd.Run()
	})
	return out.String(), err
}

// in runs f inside a namespace and fails the test with its error.
func in(t *testing.T, ns *lab.Namespace, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

// Addresses of the laboratory's kube-dns, and link-local ones.
var (
	vip4  = netip.MustParseAddrPort("10.96.0.10:53")
	vip6  = netip.MustParseAddrPort("[fd00:10:96::a]:53")
	link4 = netip.MustParseAddrPort("169.254.20.10:53")
	link6 = netip.MustParseAddrPort("[fd53:dd:20::10]:53")
)

func clusterIPs() []netip.Addr { return []netip.Addr{vip4.Addr(), vip6.Addr()} }

// probeQuery is a message that every answerer of these tests answers.
func probeQuery() []byte { return []byte{0x70, 0x6b, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0} }

// testConfig intercepts everything in both families.
func testConfig() Config {
	return Config{
		Targets: Targets{
			Addresses:  []netip.AddrPort{link4, vip4, link6, vip6},
			ClusterIPs: clusterIPs(),
			Exclude: []netip.Prefix{
				netip.MustParsePrefix("10.244.9.0/24"), netip.MustParsePrefix("10.244.9.7/32"),
				netip.MustParsePrefix("10.244.8.8/32"), netip.MustParsePrefix("fd00:10:244:9::/64"),
			},
		},
		Probe: probeQuery(),
	}
}

func mustRuleSet(t *testing.T, cfg Config) RuleSet {
	t.Helper()
	rs, err := NewRuleSet(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := runRole(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// roleEnv makes the test binary play a part instead of testing.
const roleEnv = "DNSGUARD_TEST_ROLE"

func runRole(role string) error {
	switch role {
	case "agent":
		return runAgent()
	case "await-address":
		return awaitAddressRole()
	}
	return fmt.Errorf("no such role: %s", role)
}

// roleProcess is this test binary in a role.
type roleProcess struct {
	proc *lab.Process
	out  *bufio.Reader
}

func startRole(t *testing.T, ns *lab.Namespace, role string) *roleProcess {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, in := io.Pipe()
	proc, err := ns.Start(lab.Command{Path: exe, Env: append(os.Environ(), roleEnv+"="+role), Stdout: in, Stderr: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-proc.Done()
		_ = in.Close()
	}()
	return &roleProcess{proc: proc, out: bufio.NewReader(out)}
}

// line waits for the process's next line.
func (p *roleProcess) line(t *testing.T) string {
	t.Helper()
	text, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("role ended: %v", err)
	}
	return strings.TrimSpace(text)
}
