package main

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"testing"
)

// confineEnv, if set, makes the test binary confine itself and become the
// program under test: what is measured is its memory, and nothing of the test's.
const confineEnv = "DNSGUARD_TEST_CONFINE"

// confinement is what a process has to live with from its first instruction.
type confinement struct {
	Exe    string // the program
	Procs  string // of a cgroup; empty: none
	NoFile uint64 // RLIMIT_NOFILE; 0: as it is
}

// on has the programs that fn starts confined.
func (c confinement) on(t *testing.T, n *node, fn func()) {
	t.Helper()
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Setenv(confineEnv, string(text)); err != nil { //nolint:usetesting // not to the end of the test
		t.Fatal(err)
	}
	defer func() { _ = os.Unsetenv(confineEnv) }()
	exe := n.exe
	n.exe = "" // this test binary
	defer func() { n.exe = exe }()
	fn()
}

// becomeConfined does not return.
func becomeConfined(text string) {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, "confine:", err)
		os.Exit(exitWrong)
	}
	var c confinement
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		fail(err)
	}
	if c.Procs != "" {
		if err := os.WriteFile(c.Procs, []byte("0"), 0); err != nil {
			fail(err)
		}
	}
	if c.NoFile != 0 {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: c.NoFile, Max: c.NoFile}); err != nil {
			fail(err)
		}
	}
	if err := os.Unsetenv(confineEnv); err != nil {
		fail(err)
	}
	fail(syscall.Exec(c.Exe, os.Args, os.Environ()))
}
