package upstream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// filterChain gives the present namespace, its lo set up, a chain for what passes a
// hook; the caller adds rules and flushes.
func filterChain(family nftables.TableFamily, hook *nftables.ChainHook) (*nftables.Conn, *nftables.Chain, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, nil, err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, nil, err
	}
	c, err := nftables.New()
	if err != nil {
		return nil, nil, err
	}
	table := c.AddTable(&nftables.Table{Name: "filter", Family: family})
	return c, c.AddChain(&nftables.Chain{
		Name: "filter", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: hook, Priority: nftables.ChainPriorityFilter,
	}), nil
}

// refuseOnTheWayOut makes the present namespace apply the verdict to one in so
// many UDP packets to the port before they leave.
func refuseOnTheWayOut(port uint16, oneIn uint32, verdict expr.Any) error {
	c, chain, err := filterChain(nftables.TableFamilyIPv4, nftables.ChainHookOutput)
	if err != nil {
		return err
	}
	c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
		&expr.Numgen{Register: 1, Modulus: oneIn, Type: unix.NFT_NG_RANDOM},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0)},
		verdict,
	}})
	return c.Flush()
}

// A rule that refuses one in fifty packets on their way out costs those, and
// nothing else. To drop one gives who sends it EPERM; to reject it gives the
// socket's next call ECONNREFUSED as well.
func TestRefusedOnTheWayOut(t *testing.T) {
	for name, verdict := range map[string]expr.Any{
		"drop":   &expr.Verdict{Kind: expr.VerdictDrop},
		"reject": &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 3},
	} {
		t.Run(name, func(t *testing.T) { testRefusedOnTheWayOut(t, verdict) })
	}
}

func testRefusedOnTheWayOut(t *testing.T, verdict expr.Any) {
	t.Helper()
	ns := labtest.NewNamespace(t, "upstream")
	pc, err := ns.ListenPacket(t.Context(), "udp4", "127.0.0.1:5300")
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error { return refuseOnTheWayOut(5300, 50, verdict) }); err != nil {
		t.Fatal(err)
	}
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		<-time.After(5 * time.Millisecond) // so that others are under way
		replyA(w, q)
	})}
	started := make(chan struct{})
	s.NotifyStartedFunc = func() { close(started) }
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.ActivateAndServe() })
	defer serving.Wait()
	defer func() { _ = s.Shutdown() }()
	<-started

	config, health := watched(Config{
		Budget:   usual,
		Timeouts: Timeouts{Hedge: 200 * time.Millisecond, Retry: 2 * time.Second, Total: 10 * time.Second},
		Routes:   []Route{{Zones: []string{"."}, Protocol: UDPOnly}},
		Dial: func(ctx context.Context, network string, server netip.AddrPort) (c net.Conn, err error) {
			err = ns.Do(func() (err error) {
				c, err = new(dialer).dial(ctx, network, server)
				return err
			})
			return c, err
		},
	})
	f := newForwarder(t, config, netip.MustParseAddrPort("127.0.0.1:5300"))
	const askers, each = 20, 150
	var asking sync.WaitGroup
	var mu sync.Mutex
	answered := 0
	for i := range askers {
		asking.Go(func() {
			for j := range each {
				if _, err := f.Exchange(t.Context(), query(fmt.Sprintf("n%d.of%d.example.", j, i))); err == nil {
					mu.Lock()
					answered++
					mu.Unlock()
				}
			}
		})
	}
	asking.Wait()
	st := f.Stats().Paths[UDP]
	t.Logf("%d of %d answered, %d not sent, %d sockets, %d sent", answered, askers*each, st.Failures[Local], st.Opened, st.Queries)
	if answered < askers*each*98/100 {
		t.Errorf("%d of %d answered", answered, askers*each)
	}
	if st.Failures[Local] == 0 {
		t.Error("the kernel has refused nothing: the test tests nothing")
	}
	if st.Queries > askers*each*11/10 || len(health()) > 0 {
		t.Errorf("%d sent for %d questions, %d of them again at once, health %v", st.Queries, askers*each, st.Resends, health())
	}
	if _, drop := verdict.(*expr.Verdict); drop && st.Failures[Network] > 0 {
		t.Errorf("%d network failures", st.Failures[Network])
	}
}

// With no descriptor left, what is open serves on, longer than a socket lives.
func TestNoDescriptors(t *testing.T) {
	config, health := watched(Config{Timeouts: patient()})
	f := newForwarder(t, config, serve(t, replyA))
	ask := func() {
		t.Helper()
		if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil {
			t.Error(err)
		}
	}
	ask()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	next, err := os.Open(os.DevNull) // descriptors are given out from the lowest
	if err != nil {
		t.Fatal(err)
	}
	lowest := uint64(next.Fd())
	next.Close()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: lowest, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Fatal(err)
		}
	}()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for start := time.Now(); time.Since(start) < 2500*time.Millisecond; <-ticker.C {
		ask()
	}
	if st := f.Stats().Paths[UDP]; st.Failures[Local] == 0 || len(health()) > 0 {
		t.Errorf("%d times no socket was to be had, health %v", st.Failures[Local], health())
	}
}
