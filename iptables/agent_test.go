package iptables

import (
	"encoding/json"
	"io"
	"net"
	"net/rpc"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// agent is a process in the node's namespace that intercepts and answers, as
// the daemon does. The test steers it over RPC, and ends it in every way.
type agent struct {
	t    *testing.T
	proc *lab.Process
	rpc  *rpc.Client
}

// agentConfig is what an agent is told at its start.
type agentConfig struct {
	Socket    string     // where it listens for RPC
	Config    Config     `json:"-"` // without functions
	Wire      wireConfig // the same, as it is sent
	Sockets   int        // UDP sockets an address
	Steer     bool
	Count     bool   // compare clients' counters
	NoListen  bool   // intercept only
	Path      string `json:"-"` // PATH, to choose the iptables variant
	Powerless bool   // give NET_ADMIN up first
}

// wireConfig is a Config without its functions.
type wireConfig struct {
	Targets      Targets
	Backend      Backend
	Mark         uint32
	Table        int
	RulePriority int
	Zone         uint16
	AliveTimeout time.Duration
}

func (w wireConfig) config() Config {
	return Config{
		Targets: w.Targets, Backend: w.Backend, Mark: w.Mark, Table: w.Table, RulePriority: w.RulePriority,
		Zone: w.Zone, AliveTimeout: w.AliveTimeout, Probe: probeQuery(),
	}
}

// startAgent starts an agent and returns when it has started to intercept.
func startAgent(t *testing.T, ns *lab.Namespace, cfg agentConfig) *agent {
	t.Helper()
	a, err := tryAgent(t, ns, cfg)
	if err != nil {
		t.Fatalf("start agent: %v", err)
	}
	return a
}

func tryAgent(t *testing.T, ns *lab.Namespace, cfg agentConfig) (*agent, error) {
	t.Helper()
	cfg.Socket = filepath.Join(t.TempDir(), "rpc")
	c := cfg.Config
	cfg.Wire = wireConfig{c.Targets, c.Backend, c.Mark, c.Table, c.RulePriority, c.Zone, c.AliveTimeout}
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, in := io.Pipe()
	env := append(os.Environ(), roleEnv+"=agent", "AGENT="+string(text))
	if cfg.Path != "" {
		env = append(env, "PATH="+cfg.Path)
	}
	proc, err := ns.Start(lab.Command{Path: exe, Env: env, Stdout: in, Stderr: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = proc.Signal(syscall.SIGKILL)
		<-proc.Done()
	})
	go func() {
		<-proc.Done()
		_ = in.Close()
	}()
	// One line: empty, or why it could not start.
	var problem *agentProblem
	if err := json.NewDecoder(out).Decode(&problem); err != nil {
		t.Fatalf("agent ended: %v", err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	if problem != nil {
		return nil, problem
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "unix", cfg.Socket)
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, proc: proc, rpc: rpc.NewClient(conn)}
	t.Cleanup(func() { _ = a.rpc.Close() })
	return a, nil
}

// agentProblem carries what a test wants to know of a failed start.
type agentProblem struct {
	Text         string
	Key          string
	Interface    string
	NotSupported bool
}

func (p *agentProblem) Error() string { return p.Text }

func (a *agent) call(method string, args, reply any) {
	a.t.Helper()
	if err := a.rpc.Call("Agent."+method, args, reply); err != nil {
		a.t.Fatalf("agent: %s: %v", method, err)
	}
}

// AgentStats is Stats in a form that can be sent.
type AgentStats struct {
	Backend     Backend
	Reason      string
	Active      map[string]bool
	Withdrawals map[string]uint64
	Repairs     uint64
	Bypassed    int
	Foreign     []string
	Problems    []string
	Answered    map[string]uint64 // by service, probes included
}

func (a *agent) stats() AgentStats {
	a.t.Helper()
	var s AgentStats
	a.call("Stats", struct{}{}, &s)
	return s
}

// await waits until that many events of a kind have happened since the start,
// and returns them.
func (a *agent) await(kind EventKind, n int) []Event {
	a.t.Helper()
	var out []WireEvent
	a.call("Await", AwaitArgs{Kind: kind, N: n, Timeout: 20 * time.Second}, &out)
	var events []Event
	for _, e := range out {
		events = append(events, Event{Kind: e.Kind, Service: e.Service, Client: e.Client, Reason: e.Reason, Detail: e.Detail})
	}
	return events
}

// awaitTaking waits until every service is taken.
func (a *agent) awaitTaking(services int) {
	a.t.Helper()
	a.await(Taking, services)
}

func (a *agent) signal(s os.Signal) {
	a.t.Helper()
	if err := a.proc.Signal(s); err != nil {
		a.t.Fatal(err)
	}
}

// kill ends the agent as the OOM killer would.
func (a *agent) kill() {
	a.t.Helper()
	a.signal(syscall.SIGKILL)
	<-a.proc.Done()
}
