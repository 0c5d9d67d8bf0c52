package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// scratch is the directory that a child with Files sees as its own tmpfs.
// Every Linux system has it, and it holds nothing that a child needs: the
// executables are elsewhere (a test's under /tmp, for example).
const scratch = "/run"

// outputWait bounds the wait for the output of a child that has ended, since
// a grandchild may hold the pipe open.
const outputWait = time.Second

// Command is a program to start inside a namespace.
type Command struct {
	Path   string
	Args   []string // without the program's own name
	Env    []string // nil: this process's environment
	Stdout io.Writer
	Stderr io.Writer
	// Files are written below /run, by their path relative to it. With any of
	// them the child gets a /run of its own: a tmpfs in a mount namespace that
	// ends with the child, so that nothing stays behind however it ends.
	Files map[string][]byte
}

// Process is a child process in a namespace. It is killed when the namespace
// is closed, and by the kernel when this process dies.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid once done is closed
}

// Start starts c inside the namespace, in a process group of its own: a Ctrl-C
// on the terminal reaches this process only, which then ends its children in
// the right order.
func (n *Namespace) Start(c Command) (*Process, error) {
	p := &Process{done: make(chan struct{})}
	p.cmd = exec.CommandContext(context.Background(), c.Path, c.Args...)
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = c.Env, c.Stdout, c.Stderr
	p.cmd.WaitDelay = outputWait
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error, 1)
	// The kernel sends the death signal when the *thread* that forked ends, not
	// when the process does. So this thread waits for the child, and is
	// discarded afterwards: its namespaces are the child's.
	go onThread(func() bool {
		defer close(p.done)
		err := n.fork(p, c.Files)
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			n.mu.Lock()
			delete(n.processes, p)
			n.mu.Unlock()
		}
		return false
	})
	if err := <-started; err != nil {
		<-p.done
		return nil, fmt.Errorf("start %s in namespace %s: %w", c.Path, n.label, err)
	}
	return p, nil
}

// fork starts the child from the calling thread, whose network (and mount)
// namespace the child inherits.
func (n *Namespace) fork(p *Process, files map[string][]byte) error {
	if err := n.enter(); err != nil {
		return err
	}
	if len(files) > 0 {
		if err := mountScratch(files); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.handle.IsOpen() { // closed meanwhile: nobody would end the child
		return ErrClosed
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	n.processes[p] = struct{}{}
	return nil
}

// mountScratch gives the calling thread a mount namespace with a tmpfs on
// /run, and writes the files there.
func mountScratch(files map[string][]byte) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Where the machine's mounts are shared, ours would spread back to them.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", scratch, err)
	}
	for name, data := range files {
		if !filepath.IsLocal(name) {
			return fmt.Errorf("file %q is not below %s", name, scratch)
		}
		file := filepath.Join(scratch, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// ScratchPath returns the path under which this process reaches the child's
// /run/name, for example its control socket. It ends with the child.
func (p *Process) ScratchPath(name string) string {
	return fmt.Sprintf("/proc/%d/root%s/%s", p.Pid(), scratch, strings.TrimPrefix(name, "/"))
}

// Signal sends a signal; os.ErrProcessDone if the child has ended.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Done is closed when the child has ended and its output has been read.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns how the child ended, as exec.Cmd.Wait has it. It is valid once
// Done is closed.
func (p *Process) Err() error { return p.err }

// Stop asks the child to end (SIGTERM), kills it when ctx is done before it
// has, waits for it and returns how it ended, as Err does; with ctx's error if
// the child had to be killed.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop process %d: %w", p.Pid(), err)
	}
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		p.kill()
		<-p.done
		return fmt.Errorf("process %d ignored SIGTERM and was killed: %w", p.Pid(), ctx.Err())
	}
}

// kill ends the child at once; one that has ended already needs no killing.
func (p *Process) kill() { _ = p.cmd.Process.Kill() }
