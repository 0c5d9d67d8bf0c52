package kubelab

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"syscall"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// logKept bounds what is kept of one program's output.
const logKept = 1 << 20

// Log keeps the last of what a program printed.
type Log struct {
	mu   sync.Mutex
	data []byte
}

// Write takes more output.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.data = append(l.data, p...)
	if over := len(l.data) - logKept; over > 0 {
		l.data = append(l.data[:0], l.data[over:]...)
	}
	return len(p), nil
}

// String returns all that is kept.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.data)
}

// Tail returns the last lines.
func (l *Log) Tail(lines int) string {
	all := strings.Split(strings.TrimSpace(l.String()), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Line returns the first line that holds all the texts, or "".
func (l *Log) Line(texts ...string) string {
next:
	for line := range strings.Lines(l.String()) {
		for _, text := range texts {
			if !strings.Contains(line, text) {
				continue next
			}
		}
		return strings.TrimSpace(line)
	}
	return ""
}

// logs returns the last lines of several programs; nil is none.
func logs(lines int, programs ...*Program) string {
	var b strings.Builder
	for _, p := range programs {
		if p != nil {
			b.WriteString("-- " + p.Name + "\n" + p.Log.Tail(lines) + "\n")
		}
	}
	return b.String()
}

// Program is a running program of the cluster, and what it printed.
type Program struct {
	*lab.Process
	Name string
	Log  *Log
}

// start starts a program in a namespace, with files below a /run of its own.
func start(ns *lab.Namespace, name, path string, args []string, files map[string][]byte, env ...string) (*Program, error) {
	p := &Program{Name: name, Log: new(Log)}
	// Every program gets a /run of its own: nothing is left in the machine's.
	own := map[string][]byte{".e2e": nil}
	maps.Copy(own, files)
	var err error
	p.Process, err = ns.Start(lab.Command{
		Path: path, Args: args, Stdout: p.Log, Stderr: p.Log, Files: own,
		Env: append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/run"}, env...),
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// Running is an error if the program has ended.
func (p *Program) Running() error {
	select {
	case <-p.Done():
		return fmt.Errorf("%s has ended: %w\n%s", p.Name, p.Err(), p.Log.Tail(20))
	default:
		return nil
	}
}

// Kill ends the program as the OOM killer would, and waits for its end.
func (p *Program) Kill() {
	_ = p.Signal(syscall.SIGKILL) // it may have ended
	<-p.Done()
}
