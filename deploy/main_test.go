package deploy

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the files that are made of others")

// binary is dnsguard, built for these tests.
var binary string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "dnsguard-deploy")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "dnsguard")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", binary, "./cmd/dnsguard") //nolint:noctx // ends with the test
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build dnsguard: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// dnsguard runs the binary and returns what it printed.
func dnsguard(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = []string{}
	out, err := cmd.CombinedOutput()
	return string(out), err
}
