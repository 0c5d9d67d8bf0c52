package labtest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// MemoryGroup is a memory cgroup with a limit, of either version, below or beside
// the group of this process. The kernel kills in it what does not fit.
type MemoryGroup struct {
	dir string
	v2  bool
}

// NewMemoryGroup makes a group for the test. Its processes must end before the
// test does: make it before the laboratory that they run in.
func NewMemoryGroup(t testing.TB, limit int64) *MemoryGroup {
	t.Helper()
	Require(t)
	g, err := newMemoryGroup(limit)
	if err != nil {
		Missing(t, fmt.Errorf("make a memory cgroup: %w", err))
	}
	t.Cleanup(func() {
		deadline := time.Now().Add(leakTimeout)
		for {
			err := os.Remove(g.dir)
			if err == nil {
				return
			}
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				t.Errorf("remove the memory cgroup: %v", err)
				return
			}
			time.Sleep(time.Millisecond) // its processes have ended; the kernel tells nobody when they are gone
		}
	})
	return g
}

func newMemoryGroup(limit int64) (*MemoryGroup, error) {
	parents, v2, err := memoryGroups()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, parent := range parents {
		dir, err := os.MkdirTemp(parent, "dnsguard-test-")
		if err != nil {
			errs = append(errs, err)
			continue
		}
		g := &MemoryGroup{dir: dir, v2: v2}
		if err = g.confine(limit); err == nil {
			return g, nil
		}
		errs = append(errs, err, os.Remove(dir))
	}
	return nil, errors.Join(errs...)
}

// memoryGroups returns the groups in which another can be tried: this process's
// own, and for version 2 those above it, since a group that has processes has no
// groups with controllers in it.
func memoryGroups() (dirs []string, v2 bool, err error) {
	own, err := os.ReadFile("/proc/self/cgroup") // "4:memory:/a/b", "0::/a/b"
	if err != nil {
		return nil, false, err
	}
	paths := map[bool]string{}
	for line := range strings.Lines(string(own)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) != 3:
		case f[0] == "0" && f[1] == "":
			paths[true] = f[2]
		case strings.Contains(","+f[1]+",", ",memory,"):
			paths[false] = f[2]
		}
	}
	path, ok := paths[false]
	if v2 = !ok; v2 {
		path = paths[true]
	}
	mount, root, err := memoryMount(v2)
	if err != nil {
		return nil, v2, err
	}
	rel, err := filepath.Rel(root, path)
	if err != nil || strings.HasPrefix(rel, "..") {
		rel = "." // ours is above what is mounted here
	}
	for {
		dirs = append(dirs, filepath.Join(mount, rel))
		if rel == "." || !v2 {
			return dirs, v2, nil
		}
		rel = filepath.Dir(rel)
	}
}

// memoryMount finds where the hierarchy is mounted, and which of its groups is
// the root there.
func memoryMount(v2 bool) (mount, root string, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(mounts)) {
		before, after, _ := strings.Cut(line, " - ")
		f, super := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(super) < 3 {
			continue
		}
		if v2 && super[0] == "cgroup2" || !v2 && super[0] == "cgroup" && strings.Contains(","+super[2]+",", ",memory,") {
			return f[4], f[3], nil
		}
	}
	return "", "", fmt.Errorf("no memory cgroups are mounted: %w", fs.ErrNotExist)
}

// confine sets the limit. Version 1 counts the memory of sockets only where they
// have a limit of their own.
func (g *MemoryGroup) confine(limit int64) error {
	if g.v2 {
		if err := g.write("memory.swap.max", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return g.write("memory.max", strconv.FormatInt(limit, 10))
	}
	if err := g.write("memory.kmem.tcp.limit_in_bytes", strconv.FormatInt(limit, 10)); err != nil {
		return err
	}
	return g.write("memory.limit_in_bytes", strconv.FormatInt(limit, 10))
}

// Procs is the file in which a process writes "0" to enter the group.
func (g *MemoryGroup) Procs() string { return filepath.Join(g.dir, "cgroup.procs") }

// Usage returns the octets that are charged to the group now: those of its
// processes, and of the kernel on their behalf; and what of them is for sockets.
func (g *MemoryGroup) Usage() (all, sockets int64, err error) {
	if g.v2 {
		all, err = g.number("memory.current")
		stat, serr := g.table("memory.stat")
		return all, stat["sock"], errors.Join(err, serr)
	}
	all, err = g.number("memory.usage_in_bytes")
	sockets, serr := g.number("memory.kmem.tcp.usage_in_bytes")
	return all + sockets, sockets, errors.Join(err, serr)
}

// Unreclaimable returns what of it is no page of a file, which the kernel can
// take back.
func (g *MemoryGroup) Unreclaimable() (int64, error) {
	all, _, err := g.Usage()
	stat, serr := g.table("memory.stat")
	return all - stat["active_file"] - stat["inactive_file"], errors.Join(err, serr)
}

// Kills returns how many processes were killed because the group had no memory
// for them.
func (g *MemoryGroup) Kills() (int64, error) {
	file := "memory.oom_control" // Linux 4.13
	if g.v2 {
		file = "memory.events"
	}
	events, err := g.table(file)
	return events["oom_kill"], err
}

func (g *MemoryGroup) write(file, value string) error {
	return os.WriteFile(filepath.Join(g.dir, file), []byte(value), 0)
}

func (g *MemoryGroup) number(file string) (int64, error) {
	text, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// table reads lines of a name and a number.
func (g *MemoryGroup) table(file string) (map[string]int64, error) {
	text, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out[name] = n
	}
	return out, nil
}
