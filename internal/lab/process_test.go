package lab_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// mustStartRole is startRole for tests.
func mustStartRole(t *testing.T, ns *lab.Namespace, role string, files map[string][]byte) (*lab.Process, childReport) {
	t.Helper()
	p, r, err := startRole(ns, role, files)
	if err != nil {
		t.Fatal(err)
	}
	return p, r
}

// exitSignal returns the signal that ended a child, if one did.
func exitSignal(err error) syscall.Signal {
	var exit interface{ Sys() any }
	if errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return status.Signal()
		}
	}
	return 0
}

func TestProcessInherits(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	var inside string
	if err := n.Do(func() (err error) { inside, err = currentNamespace(); return err }); err != nil {
		t.Fatal(err)
	}
	p, r := mustStartRole(t, n, "wait", nil)
	if r.Namespace != inside {
		t.Errorf("child is in %s, want %s", r.Namespace, inside)
	}
	if r.Pid != p.Pid() || r.Group != p.Pid() {
		t.Errorf("child %d (here %d) is in process group %d, want its own", r.Pid, p.Pid(), r.Group)
	}
}

func TestProcessFiles(t *testing.T) {
	labtest.CheckLeaks(t)
	const name = "dnsguard-lab-test/config.yaml"
	n := labtest.NewNamespace(t, "one")
	p, r := mustStartRole(t, n, "scratch", map[string][]byte{name: []byte("listen: []")})
	if diff := cmp.Diff(map[string]string{"/run/" + name: "listen: []"}, r.Scratch); diff != "" {
		t.Errorf("what the child sees below /run (-want +got):\n%s", diff)
	}
	if data, err := os.ReadFile(p.ScratchPath(name)); err != nil || string(data) != "listen: []" {
		t.Errorf("through %s: %q, %v", p.ScratchPath(name), data, err)
	}
	if _, err := os.Stat("/run/" + name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the machine's own /run has the file too: %v", err)
	}
	if _, err := n.Start(lab.Command{Path: "/proc/self/exe", Files: map[string][]byte{"../x": nil}}); err == nil {
		t.Error("a file outside /run was accepted")
	}
}

func TestProcessStop(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")

	p, _ := mustStartRole(t, n, "wait", nil)
	if got := exitSignal(p.Stop(t.Context())); got != syscall.SIGTERM {
		t.Errorf("ended by %v, want SIGTERM", got)
	}
	if got := exitSignal(p.Stop(t.Context())); got != syscall.SIGTERM {
		t.Errorf("second Stop: %v, want the same answer", p.Err())
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal to an ended child: %v", err)
	}

	p, _ = mustStartRole(t, n, "stubborn", nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stop of a child that ignores SIGTERM: %v", err)
	}
	if got := exitSignal(p.Err()); got != syscall.SIGKILL {
		t.Errorf("ended by %v, want SIGKILL", got)
	}
}

func TestProcessErrors(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	if _, err := n.Start(lab.Command{Path: "/nonexistent"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("start of a missing program: %v", err)
	}
	p, err := n.Start(lab.Command{Path: "/proc/self/exe", Env: []string{lab.RoleEnv + "=exit"}})
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	var exit interface{ ExitCode() int }
	if !errors.As(p.Err(), &exit) || exit.ExitCode() != 1 {
		t.Errorf("child ended with %v, want exit status 1", p.Err())
	}
}

func TestCloseKillsProcesses(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	p, _ := mustStartRole(t, n, "stubborn", map[string][]byte{"x": nil})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	default:
		t.Error("Close returned before the child had ended")
	}
	if got := exitSignal(p.Err()); got != syscall.SIGKILL {
		t.Errorf("ended by %v, want SIGKILL", got)
	}
}

// The kernel kills a child when the thread that forked it ends. Threads come
// and go here; the child must not notice.
func TestChildOutlivesThreads(t *testing.T) {
	labtest.CheckLeaks(t)
	n := labtest.NewNamespace(t, "one")
	p, _ := mustStartRole(t, n, "wait", nil)
	for range 20 {
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(runtime.LockOSThread) // never unlocked: the thread ends with the goroutine
		}
		wg.Wait()
	}
	if err := p.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("child: %v", err)
	}
	if got := exitSignal(p.Stop(t.Context())); got != syscall.SIGTERM {
		t.Errorf("ended by %v, want SIGTERM", got)
	}
}
