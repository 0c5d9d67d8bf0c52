package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// ednsSize is the UDP size that the stand-in announces, as CoreDNS does.
const ednsSize = 1232

// Faults are the ways in which a stand-in CoreDNS can misbehave. The zero
// value is none.
type Faults struct {
	Delay    time.Duration // before each answer
	Silent   bool          // queries are counted, never answered
	Truncate bool          // UDP answers carry TC and no records
	Rcode    int           // not 0: every answer is this and no records, for example dns.RcodeServerFailure
	// BlockUDP and BlockTCP drop the protocol's packets to port 53 before they
	// reach the server, as a firewall does: nothing comes back.
	BlockUDP, BlockTCP bool
}

// Question is what a DNSServer counts.
type Question struct {
	Name string // folded, absolute
	Type uint16
}

// DNSServer is a stand-in for CoreDNS: it answers from its zones, REFUSED for
// names outside them, and counts what it is asked. Methods are safe for
// concurrent use.
type DNSServer struct {
	ns      *Namespace
	zones   []*Zone
	servers []*dns.Server
	serving sync.WaitGroup
	ctx     context.Context // done when the server closes: ends delayed answers
	cancel  context.CancelFunc

	faults atomic.Pointer[Faults]

	mu     sync.Mutex
	counts map[Question]int
	udp    int
	tcp    int
}

// NewDNSServer starts a server in the namespace on UDP and TCP of each
// address. It answers when NewDNSServer returns. Close it.
func NewDNSServer(ctx context.Context, ns *Namespace, zones []*Zone, addrs ...netip.AddrPort) (*DNSServer, error) {
	s := &DNSServer{ns: ns, zones: zones, counts: make(map[Question]int)}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.faults.Store(&Faults{})
	for _, addr := range addrs {
		if err := s.listen(ctx, addr.String()); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}

// listen opens both sockets of an address and serves them. The sockets are
// bound here, so queries wait in their queues even before the loops run.
func (s *DNSServer) listen(ctx context.Context, addr string) error {
	pc, err := s.ns.ListenPacket(ctx, "udp", addr)
	if err != nil {
		return err
	}
	if err := enlarge(pc); err != nil {
		return errors.Join(err, pc.Close())
	}
	if err := s.serve(&dns.Server{PacketConn: pc, UDPSize: ednsSize, Handler: s}); err != nil {
		return errors.Join(err, pc.Close())
	}
	l, err := s.ns.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	// CoreDNS does not limit the queries of a connection either.
	if err := s.serve(&dns.Server{Listener: l, MaxTCPQueries: -1, Handler: s}); err != nil {
		return errors.Join(err, l.Close())
	}
	return nil
}

// enlarge gives a socket room for bursts: what a test loses must not be the
// stand-in's loss.
func enlarge(pc net.PacketConn) error {
	raw, err := pc.(*net.UDPConn).SyscallConn()
	if err != nil {
		return fmt.Errorf("enlarge the receive buffer: %w", err)
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	})
	if err := errors.Join(err, set); err != nil {
		return fmt.Errorf("enlarge the receive buffer: %w", err)
	}
	return nil
}

// serve runs one server until Close, and returns when it has started.
func (s *DNSServer) serve(server *dns.Server) error {
	started := make(chan error, 1)
	server.NotifyStartedFunc = func() { started <- nil }
	s.serving.Go(func() {
		if err := server.ActivateAndServe(); err != nil {
			select {
			case started <- err:
			default: // it served; its socket broke afterwards
			}
		}
	})
	if err := <-started; err != nil {
		return fmt.Errorf("serve DNS in %s: %w", s.ns, err)
	}
	s.servers = append(s.servers, server)
	return nil
}

// SetFaults replaces the faults. Queries that are waiting already keep theirs.
func (s *DNSServer) SetFaults(f Faults) error {
	old := s.faults.Swap(&f)
	if old.BlockUDP == f.BlockUDP && old.BlockTCP == f.BlockTCP {
		return nil
	}
	return s.ns.Do(func() error { return writeFirewall(f.BlockUDP, f.BlockTCP) })
}

// firewallTable drops what BlockUDP and BlockTCP name.
const firewallTable = "lab-firewall"

// writeFirewall drops queries in the calling thread's namespace.
func writeFirewall(udp, tcp bool) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("connect to nftables: %w", err)
	}
	table := &nftables.Table{Name: firewallTable, Family: nftables.TableFamilyINet}
	conn.AddTable(table)
	conn.DelTable(table)
	conn.AddTable(table)
	input := conn.AddChain(&nftables.Chain{
		Name: "input", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	block := func(proto byte) {
		conn.AddRule(&nftables.Rule{Table: table, Chain: input, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1},
			equal([]byte{proto}),
			&expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			equal([]byte{0, dnsPort}),
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	}
	if udp {
		block(unix.IPPROTO_UDP)
	}
	if tcp {
		block(unix.IPPROTO_TCP)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("program table %s: %w", firewallTable, err)
	}
	return nil
}

// ServeDNS answers one query.
func (s *DNSServer) ServeDNS(w dns.ResponseWriter, query *dns.Msg) {
	if len(query.Question) != 1 {
		return
	}
	_, overUDP := w.RemoteAddr().(*net.UDPAddr)
	s.count(query.Question[0], overUDP)
	faults := s.faults.Load()
	if faults.Silent {
		return
	}
	if faults.Delay > 0 {
		wait := time.NewTimer(faults.Delay)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-s.ctx.Done():
			return
		}
	}
	reply := s.reply(query, faults)
	if overUDP {
		if reply.Truncate(udpSize(query)); faults.Truncate {
			reply.Truncated, reply.Answer, reply.Ns = true, nil, nil
		}
	}
	_ = w.WriteMsg(reply) // a client that has gone is the client's affair
}

// reply builds the whole answer.
func (s *DNSServer) reply(query *dns.Msg, faults *Faults) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	if query.IsEdns0() != nil {
		reply.SetEdns0(ednsSize, false)
	}
	question := query.Question[0]
	if faults.Rcode != dns.RcodeSuccess {
		reply.Rcode = faults.Rcode
		return reply
	}
	for _, z := range s.zones {
		if dns.IsSubDomain(z.origin, dns.CanonicalName(question.Name)) {
			reply.Authoritative = true
			z.answer(reply, question)
			return reply
		}
	}
	reply.Rcode = dns.RcodeRefused
	return reply
}

// udpSize is how much the asker takes over UDP, RFC 6891 section 6.2.3.
func udpSize(query *dns.Msg) int {
	if opt := query.IsEdns0(); opt != nil {
		return max(int(opt.UDPSize()), dns.MinMsgSize)
	}
	return dns.MinMsgSize
}

func (s *DNSServer) count(q dns.Question, overUDP bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[Question{Name: dns.CanonicalName(q.Name), Type: q.Qtype}]++
	if overUDP {
		s.udp++
	} else {
		s.tcp++
	}
}

// Counts returns how often each question was asked, over either transport.
func (s *DNSServer) Counts() map[Question]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

// Total returns the number of questions over each transport.
func (s *DNSServer) Total() (udp, tcp int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.udp, s.tcp
}

// Close ends the server as a killed process would: the sockets vanish, delayed
// answers are not sent. Closing twice is no error.
func (s *DNSServer) Close() error {
	s.cancel()
	var errs []error
	for _, server := range s.servers {
		errs = append(errs, server.Shutdown())
	}
	s.servers = nil
	s.serving.Wait()
	return errors.Join(errs...)
}
