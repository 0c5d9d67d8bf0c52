package kubelab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// kubernetesVersion is what the components say of themselves; the tools module
// pins the code.
const kubernetesVersion = "v1.37.2"

// Components are the programs of a cluster and dnsguard itself.
type Components struct {
	Dir      string // of the cluster's programs
	DNSGuard string // path of the program under test
}

func (c *Components) path(name string) string { return filepath.Join(c.Dir, name) }

// Build returns the programs that the repository at root pins, built into its
// .cache/e2e where they are not there yet, which takes minutes and is told to
// progress. What is there is known by a digest of the tools module: a change of
// a version builds anew, nothing else does. dnsguard is always built.
func Build(ctx context.Context, root string, progress io.Writer) (*Components, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	cache := filepath.Join(root, ".cache", "e2e")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	c := &Components{DNSGuard: filepath.Join(cache, "dnsguard")}
	err = goBuild(ctx, root, c.DNSGuard, []string{"-ldflags", "-s -w -X main.version=e2e"}, "./cmd/dnsguard")
	if err != nil {
		return nil, err
	}
	tools := filepath.Join(root, "e2e", "tools")
	key, err := digest(tools)
	if err != nil {
		return nil, err
	}
	c.Dir = filepath.Join(cache, key)
	if _, err := os.Stat(c.Dir); !errors.Is(err, fs.ErrNotExist) {
		return c, err
	}
	if _, err := fmt.Fprintf(progress, "building the cluster's programs into %s: minutes, once\n", c.Dir); err != nil {
		return nil, err
	}
	if err := clean(cache); err != nil {
		return nil, err
	}
	building := c.Dir + building
	// As Kubernetes's own build does; else it calls itself v0.0.0.
	const version = "k8s.io/component-base/version."
	_, minor, _ := strings.Cut(kubernetesVersion, ".")
	minor, _, _ = strings.Cut(minor, ".")
	flags := append(compilerFlags(), "-ldflags", fmt.Sprintf("-s -w -X %[1]sgitVersion=%[2]s -X %[1]sgitMajor=1 -X %[1]sgitMinor=%[3]s", version, kubernetesVersion, minor))
	if err := os.MkdirAll(building, 0o755); err != nil {
		return nil, err
	}
	if err := goBuild(ctx, tools, building+"/", flags, "tool", "./coredns"); err != nil {
		return nil, err
	}
	return c, os.Rename(building, c.Dir)
}

// compilerFlags: no debugger will look at the programs, and the compiler spends a
// seventh of its time on what it would see. The standard library stays as it is, to
// be shared with other builds.
func compilerFlags() []string { return []string{"-gcflags=all=-dwarf=false", "-gcflags=std="} }

// building ends the name of a directory that is not complete.
const building = ".building"

// goBuild builds packages of the module in dir, without cgo: the programs must
// not depend on what the machine has.
func goBuild(ctx context.Context, dir, out string, flags []string, packages ...string) error {
	args := append([]string{"build", "-C", dir, "-mod=readonly", "-trimpath", "-buildvcs=false", "-o", out}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, packages...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %v in %s: %w\n%s", packages, dir, err, text)
	}
	return nil
}

// digest is the key of what the tools module builds.
func digest(tools string) (string, error) {
	text := fmt.Appendln(nil, runtime.Version(), runtime.GOARCH, compilerFlags())
	sources, err := filepath.Glob(filepath.Join(tools, "*", "*.go"))
	if err != nil {
		return "", err
	}
	for _, file := range append(sources, filepath.Join(tools, "go.mod"), filepath.Join(tools, "go.sum")) {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		text = fmt.Appendf(text, "%s %x\n", filepath.Base(file), sha256.Sum256(data))
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])[:12], nil
}

// Render returns what the repository's overlays and its chart tell an API server to
// apply, by their names: kubectl apply -k, and helm install.
func Render(ctx context.Context, root string) (map[string][]byte, error) {
	dir, err := os.MkdirTemp("", "dnsguard-e2e-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// Built as that module's tests are: what they have compiled is there.
	cmd := exec.CommandContext(ctx, "go", "run", "-C", filepath.Join(root, "deploy"), "-mod=readonly", "./render", dir)
	cmd.Env = append(os.Environ(), "GOWORK=off")
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("render deploy: %w\n%s", err, text)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string][]byte{}
	for _, f := range files {
		name, _, _ := strings.Cut(f.Name(), ".")
		if all[name], err = os.ReadFile(filepath.Join(dir, f.Name())); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// clean removes what earlier versions and interrupted builds left: 400 MB each.
func clean(cache string) error {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := os.RemoveAll(filepath.Join(cache, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// lock keeps other processes from building at the same time.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}
