package upstream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// closedPort returns a script of a machine where nobody listens: it tells of the
// first six queries, then of one a second (kernel, net/ipv4/icmp.c).
func closedPort() func(*fakeQuery) {
	tokens, at := 6.0, time.Now()
	return func(q *fakeQuery) {
		now := time.Now()
		tokens, at = min(6, tokens+now.Sub(at).Seconds()), now
		if q.refused = true; tokens >= 1 {
			tokens--
			q.icmp(ms, quotedLen)
		}
	}
}

// One in five questions of a burst is rejected. Its sockets are all new, and that
// nobody has answered on them yet is no reason to ask all of it again.
func TestSomeRejectedOfBursts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, inTurn(5, refused(10*ms, quotedLen), healthy(100*ms)))
		f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		const bursts, each = 40, 50
		answered := 0
		for range bursts {
			a, _ := load(t, f, each, 0)
			answered += a
			time.Sleep(5 * time.Second)
		}
		sent, received := len(n.queries()), n.count(addr(1), "udp")
		t.Logf("%d of %d answered, %d sent, %d received", answered, bursts*each, sent, received)
		if received > bursts*each*11/10 {
			t.Errorf("%d received of %d questions", received, bursts*each)
		}
		if answered < bursts*each*9/10 {
			t.Errorf("%d of %d answered", answered, bursts*each)
		}
	})
}

// The process of one of two endpoints is gone and its machine is not.
func TestClosedPort(t *testing.T) {
	for _, interval := range []time.Duration{ms, 20 * ms, 400 * ms, 3 * time.Second} {
		t.Run(fmt.Sprintf("one every %v", interval), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(7, 8))
				n := newFakeNet(t, endpoints(dice, healthy(ms), healthy(ms)))
				config, health := watched(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
				f := n.forwarder(config)
				load(t, f, 500, interval)
				n.become(addr(1), endpoints(dice, healthy(ms), closedPort()))
				const questions = 2000
				received := n.count(addr(1), "udp")
				answered, slowest := load(t, f, questions, interval)
				received = n.count(addr(1), "udp") - received
				t.Logf("%d of %d answered, slowest %v, %d received, health %v", answered, questions, slowest, received, health())
				if answered < questions*85/100 || received > questions*11/10 {
					t.Errorf("%d of %d answered, %d received", answered, questions, received)
				}
			})
		})
	}
}

// The only server's process is started anew: while it is away each question fails
// at once, and afterwards all is as before.
func TestServerRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(ms))
		f := n.forwarder(Config{Budget: usual, Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}}})
		load(t, f, 500, 10*ms)
		n.become(addr(1), refused(ms, quotedLen))
		start, before := time.Now(), len(n.queries())
		if answered, _ := load(t, f, 200, 10*ms); answered > 0 {
			t.Fatalf("%d answered by nobody", answered)
		}
		if took := time.Since(start); took > 2*time.Second+50*ms {
			t.Errorf("the last failed %v after the first was asked", took)
		}
		t.Logf("%d sent for 200 questions", len(n.queries())-before)
		n.become(addr(1), healthy(ms))
		load(t, f, 1000, 10*ms) // time for a trial
		if answered, slowest := load(t, f, 200, 10*ms); answered < 200 || slowest > ms {
			t.Errorf("%d of 200 answered afterwards, slowest %v", answered, slowest)
		}
	})
}

// An ICMP error that quotes none of our questions is forged or late, and fails
// nothing; nor do many.
func TestForgedErrors(t *testing.T) {
	for name, forge := range map[string]func(msg []byte){
		"another id":       func(msg []byte) { dnswire.SetID(msg, dnswire.ID(msg)+1) },
		"another question": func(msg []byte) { msg[dnswire.HeaderLen+1] ^= 1 },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNet(t, func(q *fakeQuery) {
					for range 5 {
						msg := append([]byte(nil), q.wire...)
						forge(msg)
						q.later(ms, func() { q.conn.errs <- &bounce{syscall.ECONNREFUSED, msg} })
					}
					q.reply(50*ms, q.good())
				})
				f := n.forwarder(Config{Budget: usual})
				const questions = 100
				answered, slowest := load(t, f, questions, 5*ms)
				if sent := len(n.queries()); answered < questions || slowest > 50*ms || sent > questions {
					t.Errorf("%d of %d answered, slowest %v, %d sent", answered, questions, slowest, sent)
				}
			})
		})
	}
}

// Whoever is told of an ICMP error may end at the same time, and its memory be used
// again: everybody gets the answer to his own question, or none.
func TestErrorsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const total = 20 * ms
		n := newFakeNet(t, func(q *fakeQuery) {
			if q.Id%2 == 0 {
				q.reply(total/2, q.good())
			}
			q.icmp(total/2, quotedLen)
			q.icmp(total, quotedLen)
		})
		f := n.forwarder(Config{
			Timeouts: Timeouts{Total: total, Retry: total / 2}, Budget: Budget{Hedge: 100, Retry: 100},
			Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}},
		})
		var answered atomic.Int64
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				for j := range 50 {
					q := query(fmt.Sprintf("n%d.of%d.example.", j, i))
					if ans, err := f.Exchange(t.Context(), q); err == nil {
						checkAnswer(t, q, ans)
						answered.Add(1)
					}
				}
			})
		}
		wg.Wait()
		if got := answered.Load(); got == 0 || got == 1000 {
			t.Errorf("%d of 1000 answered, want some", got)
		}
	})
}

// An error that every read gets, and that no ICMP error is behind, as a security
// module gives it, ends the socket: also where somebody has answered on it since older
// questions that still wait.
func TestErrorsWithoutICMP(t *testing.T) {
	for _, quotes := range []bool{true, false} {
		t.Run(fmt.Sprintf("quotes %t", quotes), func(t *testing.T) {
			server := serve(t, replyA)
			f := newForwarder(t, Config{}, server)
			s := f.servers[server]
			nc, err := new(dialer).dial(t.Context(), "udp", server)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			c := newConn(s, UDP, f.now(), false)
			c.raw, err = nc.(*net.UDPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if c.quotes = quotes && wantQuotes(c.raw); c.quotes != quotes {
				t.Fatal("the kernel does not keep what ICMP errors quote")
			}
			x := newExchange(f)
			x.few[0].srv, x.n = s, 1
			s.mu.Lock()
			c.enter(7, entry{x: x, sent: f.now()})
			c.heard = f.now() + 1
			s.unlock()
			defer c.timer.Stop()
			const most = 10
			reads, blank := 0, 0
			var dead error
			if err := c.raw.Control(func(fd uintptr) {
				for more := true; more && reads < most; reads++ {
					more, dead = c.readFailed(fd, unix.EACCES, &blank)
				}
			}); err != nil {
				t.Fatal(err)
			}
			if reads == 1 || !errors.Is(dead, unix.EACCES) {
				t.Errorf("%d reads, then %v; want a few, and %v", reads, dead, unix.EACCES)
			}
		})
	}
}

// rejectNames makes the present namespace reject what comes over UDP to the port and
// asks for a name that begins with the letter.
func rejectNames(port uint16, letter byte) error {
	c, chain, err := filterChain(nftables.TableFamilyINet, nftables.ChainHookInput)
	if err != nil {
		return err
	}
	const firstLetter = 8 + dnswire.HeaderLen + 1 // of the transport header
	c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: firstLetter, Len: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{letter}},
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH},
	}})
	return c.Flush()
}

// The kernel tells whose question an ICMP error is about: those that wait on the same
// socket are answered, and none is asked twice.
func TestQuotedErrors(t *testing.T) {
	for name, ip := range map[string]string{"IPv4": "127.0.0.1", "IPv6": "::1"} {
		t.Run(name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "upstream")
			if err := ns.Do(func() error { return rejectNames(5300, 'x') }); err != nil {
				t.Fatal(err)
			}
			server := netip.AddrPortFrom(netip.MustParseAddr(ip), 5300)
			pc, err := ns.ListenPacket(t.Context(), "udp", server.String())
			if err != nil {
				t.Fatal(err)
			}
			const waiting, rejected = 40, 10
			received, release := make(chan string, 100), make(chan struct{})
			s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
				if name := q.Question[0].Name; strings.HasPrefix(name, "n") {
					received <- name
					<-release
				}
				replyA(w, q)
			})}
			started := make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			var serving, asking sync.WaitGroup
			serving.Go(func() { _ = s.ActivateAndServe() })
			defer serving.Wait()
			defer func() { _ = s.Shutdown() }()
			<-started
			f := newForwarder(t, Config{
				Timeouts: patient(), Routes: []Route{{Zones: []string{"."}, Protocol: UDPOnly}},
				Dial: func(ctx context.Context, network string, server netip.AddrPort) (c net.Conn, err error) {
					err = ns.Do(func() (err error) {
						c, err = new(dialer).dial(ctx, network, server)
						return err
					})
					return c, err
				},
			}, server)
			ask := func(name string) error {
				_, err := f.Exchange(t.Context(), query(name))
				return err
			}
			if err := ask("www.example."); err != nil {
				t.Fatal(err)
			}
			names := make(map[string]int)
			for i := range waiting {
				asking.Go(func() {
					if err := ask(fmt.Sprintf("n%d.example.", i)); err != nil {
						t.Error(err)
					}
				})
			}
			for range waiting {
				names[<-received]++
			}
			for i := range rejected {
				if err := ask(fmt.Sprintf("x%d.example.", i)); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("error %v, want that nobody listens", err)
				}
			}
			close(release)
			asking.Wait()
			close(received)
			for name := range received {
				names[name]++
			}
			for name, n := range names {
				if n != 1 {
					t.Errorf("%s was received %d times", name, n)
				}
			}
			if len(names) != waiting {
				t.Errorf("%d names received, want %d", len(names), waiting)
			}
			if st := f.Stats().Paths[UDP]; st.Failures[Network] < rejected || !st.Up {
				t.Errorf("%d failures counted, want %d; up %v", st.Failures[Network], rejected, st.Up)
			}
		})
	}
}
