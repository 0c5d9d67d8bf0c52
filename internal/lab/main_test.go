package lab_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/dnsguard/dnsguard/internal/lab"
)

func TestMain(m *testing.M) {
	role := os.Getenv(lab.RoleEnv)
	if role == "" {
		os.Exit(m.Run())
	}
	fmt.Fprintln(os.Stderr, play(role))
	os.Exit(1)
}

// childReport is what a child tells of itself.
type childReport struct {
	Pid, Group int
	Namespace  string
	Scratch    map[string]string // contents of the files below /run
	Child      int               // a child of its own
}

// play tells about itself and then waits to be ended.
func play(role string) error {
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err
	}
	r := childReport{Pid: os.Getpid(), Group: syscall.Getpgrp(), Namespace: ns, Scratch: make(map[string]string)}
	switch role {
	case "exit":
		return errors.New("as told")
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
	case "scratch":
		err = filepath.WalkDir("/run", func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			r.Scratch[path] = string(data)
			return err
		})
	case "lab":
		r.Child, err = playLab()
	}
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		return err
	}
	// Anything but select{}: the runtime would call it a deadlock.
	<-make(chan struct{}, len(os.Args))
	return nil
}

// playLab holds a laboratory with a child process in it.
func playLab() (child int, err error) {
	l, err := lab.New()
	if err != nil {
		return 0, err
	}
	d, err := l.AddDNS(context.Background(), "dns-a", lab.ClusterZone())
	if err != nil {
		return 0, err
	}
	if err := l.DNS.SetEndpoints(lab.Endpoints(d)...); err != nil {
		return 0, err
	}
	_, r, err := startRole(l.Node.Namespace, "wait", map[string][]byte{"held-by-lab": nil})
	return r.Pid, err
}

// startRole starts this test binary in the namespace, in a role, and returns
// when it has told about itself.
func startRole(ns *lab.Namespace, role string, files map[string][]byte) (*lab.Process, childReport, error) {
	var r childReport
	exe, err := os.Executable()
	if err != nil {
		return nil, r, err
	}
	out, in := io.Pipe()
	p, err := ns.Start(lab.Command{
		Path: exe, Env: append(os.Environ(), lab.RoleEnv+"="+role), Stdout: in, Stderr: os.Stderr, Files: files,
	})
	if err != nil {
		return nil, r, err
	}
	go func() {
		<-p.Done()
		_ = in.Close()
	}()
	err = json.NewDecoder(out).Decode(&r)
	return p, r, err
}
