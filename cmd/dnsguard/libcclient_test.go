package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// goLookupEnv makes the test binary a client: it looks the name up with Go's
// own resolver.
const goLookupEnv = "DNSGUARD_TEST_GO_LOOKUP"

// goLookup looks a name up as Go programs do and tells the result in a line.
func goLookup(name string) string {
	found, err := (&net.Resolver{PreferGo: true}).LookupNetIP(context.Background(), "ip", name)
	var failure *net.DNSError
	switch {
	case errors.As(err, &failure) && failure.IsNotFound:
		return "no such host"
	case errors.As(err, &failure) && failure.IsTimeout:
		return "timeout"
	case errors.As(err, &failure) && failure.IsTemporary:
		return "temporary failure"
	case err != nil:
		return err.Error()
	}
	return addressLine(found)
}

// addressLine writes each address once, in ascending order of their text.
func addressLine(addrs []netip.Addr) string {
	var texts []string
	for _, a := range addrs {
		texts = append(texts, a.Unmap().String())
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), " ")
}

// libcClient is a program that looks names up by way of /etc/resolv.conf.
type libcClient struct {
	name string
	argv []string // the name comes last
	env  string
	// read turns what it prints into the line that lookup.c would print.
	read func(string) string
}

// libcClients compiles the clients.
func libcClients(t *testing.T) []libcClient {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		labtest.Missing(t, fmt.Errorf("Debian package busybox: %w", err))
	}
	return []libcClient{
		{name: "glibc", argv: []string{compile(t, "gcc", "lookup.c")}},
		{name: "musl", argv: []string{compile(t, "musl-gcc", "lookup.c", "-static")}},
		{name: "c-ares", argv: []string{compile(t, "gcc", "cares.c", "-lcares")}},
		{name: "go", argv: []string{self}, env: goLookupEnv},
		{name: "busybox", argv: []string{busybox, "nslookup"}, read: nslookupLine},
	}
}

// compile makes a program of a C file in testdata/libc.
func compile(t *testing.T, compiler, source string, flags ...string) string {
	t.Helper()
	if _, err := exec.LookPath(compiler); err != nil {
		labtest.Missing(t, fmt.Errorf("Debian packages gcc, musl-tools: %w", err))
	}
	program := filepath.Join(t.TempDir(), strings.TrimSuffix(source, ".c"))
	args := append([]string{"-O1", "-Wall", "-Wextra", "-Werror", "-o", program, filepath.Join("testdata", "libc", source)}, flags...)
	out, err := exec.CommandContext(t.Context(), compiler, args...).CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "ares.h") {
			labtest.Missing(t, fmt.Errorf("Debian package libc-ares-dev: %w\n%s", err, out))
		}
		t.Fatalf("%s %v: %v\n%s", compiler, args, err, out)
	}
	return program
}

// nslookupLine reads the output of busybox nslookup.
func nslookupLine(out string) string {
	var found []netip.Addr
	var told []string
	named := false
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		key, value, _ := strings.Cut(line, ":")
		switch {
		case key == "Name":
			named = true // before, the address is the server's
		case named && strings.HasPrefix(key, "Address"):
			if a, err := netip.ParseAddr(strings.TrimSpace(value)); err == nil {
				found = append(found, a)
			}
		case strings.HasPrefix(line, "***"), strings.HasPrefix(line, "**"):
			told = append(told, line)
		}
	}
	if len(found) > 0 {
		return addressLine(found)
	}
	return strings.Join(told, "; ")
}

// lookupTimeout bounds one look-up, of a client that tries for long.
const lookupTimeout = 20 * time.Second

// inPod makes the pod's own resolv.conf the one that a program sees, whatever
// the machine does, and starts it. The files are in a /run of its own, in a
// mount namespace that ends with it.
const inPod = `mount --bind /run/resolv.conf /etc/resolv.conf &&
{ [ ! -e /etc/nsswitch.conf ] || mount --bind /run/nsswitch.conf /etc/nsswitch.conf; } &&
exec "$@"`

// lookup runs the client in the pod.
func (c *libcClient) lookup(t *testing.T, pod *lab.Pod, resolvConf, name string) string {
	t.Helper()
	var out bytes.Buffer
	env := os.Environ()
	args := append([]string{"-c", inPod, "sh"}, c.argv...)
	if c.env != "" {
		env = append(env, c.env+"="+name)
	} else {
		args = append(args, name)
	}
	p, err := pod.Start(lab.Command{
		Path: "/bin/sh", Args: args, Env: env, Stdout: &out, Stderr: &out,
		Files: map[string][]byte{"resolv.conf": []byte(resolvConf), "nsswitch.conf": []byte("hosts: files dns\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-time.After(lookupTimeout):
		_ = p.Signal(os.Kill)
		<-p.Done()
		t.Errorf("%s does not come to an end with %s", c.name, name)
	}
	if c.read != nil {
		return c.read(out.String())
	}
	return strings.TrimSpace(out.String())
}
