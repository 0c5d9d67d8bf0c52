package labtest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// leakTimeout bounds the wait for what ends on its own: threads and goroutines
// that have been told to.
const leakTimeout = 5 * time.Second

// CheckLeaks fails the test if, when it and its other clean-ups are over, this
// process still has a thread, a descriptor or a socket in a namespace other
// than its own, a child process, or more goroutines than now. Call it first in
// the test; the test must not be parallel.
func CheckLeaks(t testing.TB) {
	t.Helper()
	goroutines := runtime.NumGoroutine()
	t.Cleanup(func() {
		deadline := time.Now().Add(leakTimeout)
		for {
			err := errors.Join(foreignThreads(), foreignDescriptors(), children())
			if n := runtime.NumGoroutine(); n > goroutines {
				err = errors.Join(err, fmt.Errorf("%d goroutines, %d at the start", n, goroutines))
			}
			if err == nil {
				return
			}
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<16)
				t.Errorf("left behind:\n%v\n%s", err, stacks[:runtime.Stack(stacks, true)])
				return
			}
			time.Sleep(time.Millisecond) // the end of a thread is not announced
		}
	})
}

// home names the process's own network namespace, as /proc does.
func home() (string, error) { return os.Readlink("/proc/self/ns/net") }

// foreignThreads reports threads outside the process's namespace.
func foreignThreads() error {
	own, err := home()
	if err != nil {
		return err
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		return err
	}
	var errs []error
	for _, task := range tasks {
		ns, err := os.Readlink(task)
		if err == nil && ns != own { // an error: the thread has just ended
			errs = append(errs, fmt.Errorf("thread %s is in %s", strings.Split(task, "/")[4], ns))
		}
	}
	return errors.Join(errs...)
}

// foreignDescriptors reports descriptors that hold another namespace: its own
// file, or a socket in it.
func foreignDescriptors() error {
	own, err := home()
	if err != nil {
		return err
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil {
			continue // closed meanwhile
		}
		switch {
		case strings.HasPrefix(target, "net:["):
			errs = append(errs, fmt.Errorf("descriptor %s is %s", e.Name(), target))
		case strings.HasPrefix(target, "socket:["):
			fd, err := strconv.Atoi(e.Name())
			if err != nil {
				return err
			}
			if ns, ok := namespaceOf(fd); ok && ns != own {
				errs = append(errs, fmt.Errorf("descriptor %s is a socket in %s", e.Name(), ns))
			}
		}
	}
	return errors.Join(errs...)
}

// namespaceOf names the network namespace of a socket (SIOCGSKNS, kernel 4.10).
func namespaceOf(socket int) (string, bool) {
	fd, err := unix.IoctlRetInt(socket, unix.SIOCGSKNS)
	if err != nil {
		return "", false
	}
	defer func() { _ = unix.Close(fd) }()
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	return name, err == nil
}

// children reports child processes, dead ones that nobody waited for included.
func children() error {
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return err
	}
	for _, list := range lists {
		pids, err := os.ReadFile(list)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			return err
		}
		if len(pids) > 0 {
			return fmt.Errorf("child processes %s", strings.TrimSpace(string(pids)))
		}
	}
	return nil
}
