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
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

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
	s, err := Listen(context.Background(), addr, ListenConfig{UDP: cfg.Sockets, Net: withBuffer(2 << 20)})
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

// Starve lets the process have no descriptor more than it has, or again as many as
// it likes.
func (a *Agent) Starve(on bool, _ *struct{}) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = limit.Max
	if on {
		limit.Cur = 0
	}
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
}

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
		if err := leave(s); err != nil {
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

// deadPeer is where nothing ever comes from: the discard port of this node,
// RFC 863.
const deadPeer = 9

// leave takes the UDP sockets out of the kernel's choice without closing them,
// as the resolver does before it drains them.
func leave(s *Sockets) error {
	for i, c := range s.UDP {
		if err := disconnect(c, s.Addr.Addr()); err != nil {
			return fmt.Errorf("leave udp %v, socket %d: %w", s.Addr, i, err)
		}
	}
	return nil
}

func disconnect(c *net.UDPConn, addr netip.Addr) error {
	var to unix.Sockaddr = &unix.SockaddrInet4{Port: deadPeer, Addr: [4]byte{127, 0, 0, 1}}
	if addr.Is6() {
		to = &unix.SockaddrInet6{Port: deadPeer, Addr: netip.IPv6Loopback().As16()}
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.Connect(int(fd), to) })
	return errors.Join(cerr, err)
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
