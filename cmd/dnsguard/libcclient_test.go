package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// goLookupEnv makes the test binary a client that looks names up with Go's own
// resolver.
const goLookupEnv = "DNSGUARD_TEST_GO_LOOKUP"

// goLookups is testdata/libc/lookup.c for Go.
func goLookups(in io.Reader, out io.Writer) {
	for names := bufio.NewScanner(in); names.Scan(); {
		fmt.Fprintf(out, "%s\n.\n", goLookup(names.Text()))
	}
}

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
	// command is what a shell runs. It reads names, a line each, and prints
	// what it finds for each and then a line with a dot.
	command string
	args    []string // of the command: $1 and so on
	env     string
	// read turns what it prints for a name into what lookup.c would print.
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
		{name: "glibc", command: "exec $1", args: []string{compile(t, "gcc", "lookup.c")}},
		{name: "musl", command: "exec $1", args: []string{compile(t, "musl-gcc", "lookup.c", "-static")}},
		{name: "c-ares", command: "exec $1", args: []string{compile(t, "gcc", "cares.c", "-lcares")}},
		{name: "go", command: "exec $1", args: []string{self}, env: goLookupEnv + "=1"},
		{name: "busybox", command: "while read -r name; do $1 nslookup $name; echo .; done", args: []string{busybox}, read: nslookupLine},
	}
}

// compile makes a program of a C file in testdata/libc.
func compile(t *testing.T, compiler, source string, flags ...string) string {
	t.Helper()
	if _, err := exec.LookPath(compiler); err != nil {
		labtest.Missing(t, fmt.Errorf("Debian packages gcc, musl-tools: %w", err))
	}
	program := filepath.Join(t.TempDir(), strings.TrimSuffix(source, ".c"))
	args := append([]string{"-O1", "-Wall", "-Wextra", "-o", program, filepath.Join("testdata", "libc", source)}, flags...)
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
		case strings.HasPrefix(line, "**"):
			told = append(told, strings.TrimLeft(line, "* "))
		}
	}
	if len(found) > 0 {
		return addressLine(found)
	}
	slices.Sort(told)
	return strings.Join(slices.Compact(told), "; ")
}

// lookupTimeout bounds one look-up: more than any client tries.
const lookupTimeout = 30 * time.Second

// inPod makes the pod's own resolv.conf the one that a program sees, whatever
// the machine does, and names come from a pipe. The files are in a /run of the
// pod's own, in a mount namespace that ends with it.
const inPod = `
mount --bind /run/resolv.conf /etc/resolv.conf || exit
[ ! -e /etc/nsswitch.conf ] || mount --bind /run/nsswitch.conf /etc/nsswitch.conf || exit
exec <"$1" 2>&1
shift
`

// libcProcess is a client that runs in a pod.
type libcProcess struct {
	client  libcClient
	process *lab.Process
	in      *os.File
	out     *bufio.Scanner
}

// start starts the client in the pod.
func (c libcClient) start(pod *lab.Pod, dir, resolvConf string) (*libcProcess, error) {
	pipe := filepath.Join(dir, pod.Name+".names")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(pipe) }() // both ends are open then
	in, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	out, stdout := io.Pipe()
	p, err := pod.Start(lab.Command{
		Path: "/bin/sh", Args: append([]string{"-c", inPod + "echo ready\n" + c.command, "sh", pipe}, c.args...),
		Env: append(os.Environ(), c.env), Stdout: stdout, Stderr: os.Stderr,
		Files: map[string][]byte{"resolv.conf": []byte(resolvConf), "nsswitch.conf": []byte("hosts: files dns\n")},
	})
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	go func() {
		<-p.Done()
		_ = stdout.Close()
	}()
	lp := &libcProcess{client: c, process: p, in: in, out: bufio.NewScanner(out)}
	lp.out.Buffer(nil, 1<<16)
	if !lp.out.Scan() || lp.out.Text() != "ready" {
		return nil, fmt.Errorf("%s in pod %s: %w", c.name, pod.Name, errors.Join(lp.stop(), errors.New("did not start")))
	}
	return lp, nil
}

// lookup looks a name up.
func (p *libcProcess) lookup(name string) (string, error) {
	if _, err := fmt.Fprintln(p.in, name); err != nil {
		return "", err
	}
	timer := time.AfterFunc(lookupTimeout, func() { _ = p.process.Signal(os.Kill) })
	defer timer.Stop()
	var text []string
	for p.out.Scan() {
		if line := p.out.Text(); line != "." {
			text = append(text, line)
			continue
		}
		out := strings.Join(text, "\n")
		if p.client.read != nil {
			out = p.client.read(out)
		}
		return out, nil
	}
	return "", fmt.Errorf("%s ended while it looked %s up: %w", p.client.name, name, p.process.Err())
}

// stop has the client come to the end of its names, and waits for its own.
func (p *libcProcess) stop() error {
	err := p.in.Close()
	<-p.process.Done()
	return errors.Join(err, p.process.Err())
}
