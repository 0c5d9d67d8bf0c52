package kubelab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// containerEnv makes a program that calls Contain the container that its value
// describes.
const containerEnv = "DNSGUARD_E2E_CONTAINER"

// container is what a container runtime is told of a pod's container. Its files
// are below /run, a tmpfs of the process's own (lab.Command.Files).
type container struct {
	Binary       string // the image has this file alone, as /usr/bin/dnsguard
	IPTables     string // but for iptables, of this variant, in Containerfile's target
	Argv         []string
	Env          []string
	Capabilities []uintptr // the only ones
	Volumes      []string  // writable directories
	HostFiles    []string  // writable files that the host lends
}

// Where a container's parts are, before they are its own.
const (
	containerRoot   = "/run/root"
	containerConfig = "/run/config.yaml"
	containerHost   = "/run/host" // the host's files
	configVolume    = "/etc/dnsguard"
	imageBinary     = "/usr/bin/dnsguard"
)

// Contain turns this process into a container, if it was started as one, and does
// not return then. A test's main function calls it first.
func Contain() {
	text := os.Getenv(containerEnv)
	if text == "" {
		return
	}
	var c container
	err := json.Unmarshal([]byte(text), &c)
	if err == nil {
		err = c.become()
	}
	fmt.Fprintln(os.Stderr, "container:", err)
	os.Exit(1)
}

// become confines this process as the container runtime confines a container on
// the host network that asks for no more than some capabilities, and runs the
// image's program in its place.
func (c *container) become() error {
	runtime.LockOSThread() // what follows is the thread's, and exec keeps this one's
	if err := c.mount(); err != nil {
		return err
	}
	if err := unix.Chroot(containerRoot); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := c.confine(); err != nil {
		return err
	}
	return fmt.Errorf("run %v: %w", c.Argv, syscall.Exec(imageBinary, c.Argv, c.Env))
}

// mount makes a root that holds the binary, the volumes and /proc.
func (c *container) mount() error {
	for _, dir := range append([]string{"/proc", "/tmp", filepath.Dir(imageBinary)}, c.Volumes...) {
		if err := os.MkdirAll(containerRoot+dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(containerRoot+imageBinary, nil, 0o755); err != nil {
		return err
	}
	steps := []mountStep{
		{containerRoot, containerRoot, "", unix.MS_BIND},
	}
	if c.IPTables != "" {
		system, err := c.debian()
		if err != nil {
			return err
		}
		steps = append(steps, system...)
	}
	for _, file := range c.HostFiles {
		for _, f := range []string{containerHost + file, containerRoot + file} {
			if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(f, nil, 0o600); err != nil {
				return err
			}
		}
		steps = append(steps, mountStep{containerHost + file, containerRoot + file, "", unix.MS_BIND})
	}
	steps = append(steps, []mountStep{
		{c.Binary, containerRoot + imageBinary, "", unix.MS_BIND},
		{"/proc", containerRoot + "/proc", "", unix.MS_BIND | unix.MS_REC},
		{"/proc/sys", containerRoot + "/proc/sys", "", unix.MS_BIND},
		{"", containerRoot + "/proc/sys", "", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY},
	}...)
	for _, v := range c.Volumes {
		steps = append(steps, mountStep{"tmpfs", containerRoot + v, "tmpfs", 0})
	}
	steps = append(steps, mountStep{"", containerRoot, "", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY})
	for _, s := range steps {
		if err := unix.Mount(s.source, s.target, s.kind, s.flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", s.source, s.target, err)
		}
	}
	return copyFile(containerConfig, containerRoot+configVolume+"/config.yaml")
}

// mountStep is one call of mount.
type mountStep struct {
	source, target, kind string
	flags                uintptr
}

// debian adds to the root what Containerfile's target iptables has of Debian: this
// machine's libraries and programs in the place of that image's.
func (c *container) debian() ([]mountStep, error) {
	var steps []mountStep
	for _, dir := range []string{"/usr/lib", "/usr/lib64", "/usr/sbin"} {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.MkdirAll(containerRoot+dir, 0o755); err != nil {
			return nil, err
		}
		steps = append(steps, mountStep{dir, containerRoot + dir, "", unix.MS_BIND})
		if err := os.Symlink("usr/"+filepath.Base(dir), containerRoot+"/"+filepath.Base(dir)); err != nil {
			return nil, err
		}
	}
	// update-alternatives --set
	if err := os.MkdirAll(containerRoot+"/etc/alternatives", 0o755); err != nil {
		return nil, err
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-restore", "-save"} {
			err := os.Symlink("/usr/sbin/"+program+"-"+c.IPTables+verb, containerRoot+"/etc/alternatives/"+program+verb)
			if err != nil {
				return nil, err
			}
		}
	}
	return steps, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	data, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o644)
}

// confine leaves the thread no capability but the container's, and no way to get
// others.
func (c *container) confine() error {
	keep := map[uintptr]bool{}
	var mask [2]uint32
	for _, capability := range c.Capabilities {
		keep[capability] = true
		mask[capability/32] |= 1 << (capability % 32)
	}
	for capability := range uintptr(unix.CAP_LAST_CAP + 1) {
		if keep[capability] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", capability, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		data[i] = unix.CapUserData{Effective: mask[i], Permitted: mask[i], Inheritable: 0}
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}
