//go:build !race

package ratio

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
)

// benchmark is one of another package's.
type benchmark struct{ program, name string }

// compile builds the tests of a package.
func compile(t *testing.T, dir, name string) *benchmark {
	t.Helper()
	b := &benchmark{program: filepath.Join(t.TempDir(), filepath.Base(dir)+".test"), name: name}
	out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", b.program, dir).CombinedOutput()
	if err != nil {
		t.Fatalf("go test -c %s: %v\n%s", dir, err, out)
	}
	return b
}

// least runs the benchmark for some short times, and returns the least ns/op.
func (b *benchmark) least(t *testing.T) float64 {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), b.program,
		"-test.run", "^$", "-test.bench", "^"+b.name+"$", "-test.benchtime", slice.String(), "-test.count", "40")
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", b.name, err, out)
	}
	least := 0.0
	for _, m := range regexp.MustCompile(`([0-9.]+) ns/op`).FindAllSubmatch(bytes.TrimSpace(out), -1) {
		if ns, err := strconv.ParseFloat(string(m[1]), 64); err == nil && (least == 0 || ns < least) {
			least = ns
		}
	}
	if least == 0 {
		t.Fatalf("no %s in %s", b.name, b.program)
	}
	return least
}
