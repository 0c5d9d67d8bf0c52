package iptables

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// --- the other side

// Agent is the RPC service.
type Agent struct {
	i       *Interceptor
	sockets []*Sockets
	serving sync.WaitGroup

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each event
	events   []WireEvent
	received map[Client]uint64
	answered map[string]uint64
}

// WireEvent is an Event as it is sent.
type WireEvent struct {
	Kind           EventKind
	Service        Service
	Client         Client
	Reason, Detail string
	Err            string
}

func runAgent() error {
	var cfg agentConfig
	if err := json.Unmarshal([]byte(os.Getenv("AGENT")), &cfg); err != nil {
		return err
	}
	a := &Agent{changed: make(chan struct{}), received: make(map[Client]uint64), answered: make(map[string]uint64)}
	cfg.Config = cfg.Wire.config()
	cfg.Config.OnEvent = a.note
	if cfg.Count {
		cfg.Config.Received = a.count
	}
	err := giveUp(cfg)
	if err == nil {
		err = a.start(cfg)
	}
	if err != nil {
		p := agentProblem{Text: err.Error(), NotSupported: errors.Is(err, ErrNotSupported)}
		if ce, ok := errors.AsType[*ConfigError](err); ok {
			p.Key = ce.Key
		}
		if ae, ok := errors.AsType[*AddressError](err); ok {
			p.Interface = ae.Interface
		}
		return json.NewEncoder(os.Stdout).Encode(p)
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "unix", cfg.Socket)
	if err != nil {
		return err
	}
	s := rpc.NewServer()
	if err := s.RegisterName("Agent", a); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(nil); err != nil {
		return err
	}
	s.Accept(l)
	return nil
}

// giveUp runs the agent anew without NET_ADMIN: the bounding set of the thread
// that executes the program limits what it gets.
func giveUp(cfg agentConfig) error {
	if !cfg.Powerless {
		return nil
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_NET_ADMIN, 0, 0, 0); err != nil {
		return err
	}
	cfg.Powerless = false
	text, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	if err := os.Setenv("AGENT", string(text)); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, os.Environ())
}

func (a *Agent) start(cfg agentConfig) error {
	i, err := New(cfg.Config)
	if err != nil {
		return err
	}
	a.i = i
	if !cfg.NoListen {
		for _, addr := range cfg.Config.Addresses {
			if err := a.listen(addr, cfg); err != nil {
				return err
			}
		}
	}
	if err := i.Start(context.Background()); err != nil {
		return err
	}
	go func() { _ = i.Run(context.Background()) }()
	return nil
}

func (a *Agent) listen(addr netip.AddrPort, cfg agentConfig) error {
	s, err := Listen(context.Background(), addr, ListenConfig{UDP: cfg.Sockets, ReceiveBuffer: 4 << 20})
	if err != nil {
		return err
	}
	if cfg.Steer {
		if err := s.Steer(); err != nil {
			return err
		}
	}
	a.sockets = append(a.sockets, s)
	for _, c := range s.UDP {
		a.serving.Go(func() { a.serveUDP(c, addr) })
	}
	for _, l := range s.TCP {
		a.serving.Go(func() { a.serveTCP(l, addr) })
	}
	return nil
}

func (a *Agent) serveUDP(c *net.UDPConn, addr netip.AddrPort) {
	buf := make([]byte, 4096)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		if err != nil {
			continue
		}
		a.arrived(Client{from.Addr().Unmap(), UDP})
		if reply := answer(buf[:n]); reply != nil {
			_, _ = c.WriteToUDPAddrPort(reply, from)
			a.left(Service{addr, UDP})
		}
	}
}

func (a *Agent) serveTCP(l *net.TCPListener, addr netip.AddrPort) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			return
		}
		a.arrived(Client{c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(), TCP})
		go func() {
			defer func() { _ = c.Close() }()
			var size [2]byte
			for {
				if _, err := io.ReadFull(c, size[:]); err != nil {
					return
				}
				query := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, query); err != nil {
					return
				}
				reply := answer(query)
				if _, err := c.Write(append(be16(uint16(len(reply))), reply...)); err != nil {
					return
				}
				a.left(Service{addr, TCP})
			}
		}()
	}
}

// answerFrom is the address in the agent's answers.
var answerFrom = netip.MustParseAddr("192.0.2.53")

// answer answers any question with answerFrom, and a message without question
// with its header.
func answer(query []byte) []byte {
	if len(query) < 12 || query[2]&0x80 != 0 {
		return nil
	}
	end := 12
	if query[5] == 1 {
		for end < len(query) && query[end] != 0 {
			end += int(query[end]) + 1
		}
		end += 5
	}
	if end > len(query) {
		return nil
	}
	reply := slices.Clone(query[:end])
	reply[2] |= 0x80
	reply[3] |= 0x80
	clear(reply[6:12])
	if query[5] == 1 {
		reply[7] = 1
		reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4)
		reply = append(reply, answerFrom.AsSlice()...)
	}
	return reply
}

func (a *Agent) arrived(c Client) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.received[c]++
}

func (a *Agent) left(s Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answered[s.String()]++
}

func (a *Agent) count(c Client) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.received[c]
}

func (a *Agent) note(e Event) {
	w := WireEvent{Kind: e.Kind, Service: e.Service, Client: e.Client, Reason: e.Reason, Detail: e.Detail}
	if e.Err != nil {
		w.Err = e.Err.Error()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.events = append(a.events, w)
	close(a.changed)
	a.changed = make(chan struct{})
}

// AwaitArgs say which events to wait for.
type AwaitArgs struct {
	Kind    EventKind
	N       int
	Timeout time.Duration
}

// Await returns the events of a kind when there are enough.
func (a *Agent) Await(args AwaitArgs, reply *[]WireEvent) error {
	timeout := time.After(args.Timeout)
	for {
		a.mu.Lock()
		changed := a.changed
		*reply = slices.DeleteFunc(slices.Clone(a.events), func(e WireEvent) bool { return e.Kind != args.Kind })
		all := slices.Clone(a.events)
		a.mu.Unlock()
		if len(*reply) >= args.N {
			return nil
		}
		select {
		case <-changed:
		case <-timeout:
			var s AgentStats
			_ = a.Stats(struct{}{}, &s)
			return fmt.Errorf("%d of %d %q events; all events: %+v; state: %+v", len(*reply), args.N, args.Kind, all, s)
		}
	}
}

// Stats returns Interceptor.Stats.
func (a *Agent) Stats(_ struct{}, reply *AgentStats) error {
	s := a.i.Stats()
	*reply = AgentStats{
		Backend: s.Backend, Reason: s.Reason, Withdrawals: s.Withdrawals, Repairs: s.Repairs,
		Bypassed: s.Bypassed, Foreign: s.ForeignRules, Active: make(map[string]bool), Answered: make(map[string]uint64),
	}
	for addr, active := range s.Active {
		reply.Active[addr.String()] = active
	}
	for _, err := range []error{s.RepairError, s.AliveError, s.BypassError} {
		if err != nil {
			reply.Problems = append(reply.Problems, err.Error())
		}
	}
	for _, err := range s.ProbeErrors {
		reply.Problems = append(reply.Problems, err.Error())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(reply.Answered, a.answered)
	return nil
}

// Withdraw and Restore are the Interceptor's, by family or for all.
func (a *Agent) Withdraw(which string, _ *struct{}) error {
	return a.i.Withdraw("test", selects(which))
}

// Restore is the Interceptor's.
func (a *Agent) Restore(which string, _ *struct{}) error { return a.i.Restore(selects(which)) }

func selects(which string) func(Service) bool {
	switch which {
	case "4":
		return IPv4
	case "6":
		return IPv6
	}
	return All
}

// Apply is the Interceptor's.
func (a *Agent) Apply(t Targets, _ *struct{}) error { return a.i.Apply(t) }

// Leave hands over to a newcomer: out of the kernel's choice, queues read,
// sockets closed.
func (a *Agent) Leave(drain time.Duration, _ *struct{}) error {
	for _, s := range a.sockets {
		if err := s.Leave(); err != nil {
			return err
		}
	}
	for _, s := range a.sockets {
		for _, c := range s.UDP {
			_ = c.SetReadDeadline(time.Now().Add(drain))
		}
		for _, l := range s.TCP {
			_ = l.SetDeadline(time.Now().Add(drain))
		}
	}
	a.serving.Wait()
	var errs []error
	for _, s := range a.sockets {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// Close ends the interception.
func (a *Agent) Close(_ struct{}, _ *struct{}) error { return a.i.Close() }

// Settle is that of every address.
func (a *Agent) Settle(_ struct{}, reply *bool) error {
	*reply = true
	for _, s := range a.sockets {
		done, err := s.Settle()
		if err != nil {
			return err
		}
		*reply = *reply && done
	}
	return nil
}
