package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// hotLoad asks for what is cached, from one pod.
func (n *node) hotLoad(pod *lab.Pod, overTCP bool, rate int, length time.Duration) *stream {
	s := &stream{name: "hot", ns: pod.Namespace, load: lab.Load{
		Server: clusterIP4, TCP: overTCP, Rate: rate, Queries: int(float64(rate) * length.Seconds()),
		Sockets: 4, Names: []string{cachedName}, Timeout: 4 * time.Second,
	}}
	if overTCP {
		s.load.Sockets = 0
	}
	return s
}

// TestNodeFloods: what one pod does, be it malice or a bug, does not keep others
// from their answers, and leaves nothing behind in the daemon. What is measured is
// compared within the run: a machine may be slow.
func TestNodeFloods(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	h := n.addHostile()
	attacker, polite := labtest.AddPod(t, n.Lab, "attacker"), n.pod
	d := n.start("a", "listen: []", h.upstreams())
	defer d.stop()
	if err := n.ask(polite.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Fatal(err)
	}
	const length = 3 * time.Second
	calm := n.hotLoad(polite, false, 500, 2*time.Second)
	if lost := drive(t, []*stream{calm})(); lost > 0 {
		t.Fatalf("%d lost without a flood", lost)
	}
	before := d.footprint()
	attack := func(name string, rate int) *stream {
		return &stream{name: name, ns: attacker.Namespace, load: lab.Load{
			Server: clusterIP4, Rate: rate, Queries: int(float64(rate) * length.Seconds()), Sockets: 4,
			Names: []string{name}, Unique: true, Timeout: 4 * time.Second,
		}}
	}
	failed := func(s *stream) int { return s.result.Failed() }

	t.Run("random names", func(t *testing.T) {
		// A miss takes 200 ms here; who is led to wait behind one, shows it.
		for _, pod := range n.dns {
			if err := pod.Server.SetFaults(lab.Faults{Delay: 200 * time.Millisecond}); err != nil {
				t.Fatal(err)
			}
		}
		hot, flood := n.hotLoad(polite, false, 500, length), attack("uncached.example.com.", 800)
		drive(t, []*stream{hot, flood})()
		for _, pod := range n.dns {
			if err := pod.Server.SetFaults(lab.Faults{}); err != nil {
				t.Fatal(err)
			}
		}
		t.Logf("hot names, 99 of 100: %v without, %v beside the flood; a random name: %v", calm.result.Percentile(99), hot.result.Percentile(99), flood.result.Percentile(50))
		if failed(hot) > 0 {
			t.Errorf("%d hot names were not answered", failed(hot))
		}
		for _, p := range []float64{50, 99} {
			if flood.result.Answered == 0 || hot.result.Percentile(p) > flood.result.Percentile(p)/2 {
				t.Errorf("a hot name waits as if it were not known: %v of %v for %v of 100", hot.result.Percentile(p), flood.result.Percentile(p), p)
			}
		}
		if got := d.metric("dnsguard_cache_evictions_total"); got > 0 {
			t.Errorf("%v entries were evicted for names with a TTL of 0", got)
		}
	})

	t.Run("one client asks for everything", func(t *testing.T) {
		flood := attack("silent."+hostileZone, 4000)
		// Names that are not known: they need room among the questions under way.
		misses := &stream{name: "polite", ns: polite.Namespace, load: lab.Load{
			Server: clusterIP4, Rate: 100, Queries: int(100 * length.Seconds()), Sockets: 4,
			Names: []string{"uncached.example.com."}, Unique: true, Timeout: 4 * time.Second,
		}}
		hot := n.hotLoad(polite, false, 200, length)
		drive(t, []*stream{flood, misses, hot})()
		if failed(misses) > 0 || failed(hot) > 0 {
			t.Errorf("another client had %d misses and %d hits not answered", failed(misses), failed(hot))
		}
		t.Logf("shed: %v of the client, %v in all", d.metric("dnsguard_shed_total", `reason="client"`), d.metric("dnsguard_shed_total"))
		if d.metric("dnsguard_shed_total") == 0 {
			t.Error("nothing was shed: it was no flood")
		}
	})

	many := n.manyAddresses(attacker)
	for _, tt := range []struct {
		name   string
		conns  int
		from   func() netip.Addr
		reason string // why the attacker's are refused
	}{
		{"slow connections", 300, func() netip.Addr { return netip.Addr{} }, "tcp_client"},
		{"slow connections from many", 1500, many, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			query := pipeline(t, cachedName, dns.TypeA, 1)
			for range tt.conns {
				wg.Go(func() { slowLoris(ctx, attacker, tt.from, query) })
			}
			if tt.reason != "" {
				await(t, "connections of the attacker to be refused", func() bool { return d.metric("dnsguard_shed_total", fmt.Sprintf("reason=%q", tt.reason)) > 0 })
			} else {
				await(t, "all connections to be taken", func() bool { return d.metric("dnsguard_tcp_connections") >= 990 })
			}
			others, hot := n.hotLoad(polite, true, 100, length), n.hotLoad(polite, false, 200, length)
			drive(t, []*stream{others, hot})()
			stop()
			wg.Wait()
			if failed(hot) > 0 {
				t.Errorf("another client had %d queries over UDP not answered", failed(hot))
			}
			// Where all places are taken, one that came late may not find one that is
			// old enough; on a machine that is slow to let it ask it may lose its own.
			if bound := map[string]int{"tcp_client": 0, "": others.result.Sent / 10}[tt.reason]; failed(others) > bound {
				t.Errorf("another client had %d queries over TCP not answered", failed(others))
			}
		})
	}

	t.Run("malformed", func(t *testing.T) {
		good := n.malformed(t, attacker, length)
		if good > 0 {
			t.Errorf("%d answers to what is no query are no errors", good)
		}
		hot := n.hotLoad(polite, false, 200, time.Second)
		if lost := drive(t, []*stream{hot})(); lost > 0 {
			t.Errorf("%d lost after it", lost)
		}
	})

	d.settles(t, before)
	if line := d.logged("stand still"); line != "" {
		t.Error(line)
	}
}

// slowLoris always has a connection open, on which a query comes octet by octet
// and never whole.
func slowLoris(ctx context.Context, pod *lab.Pod, from func() netip.Addr, query []byte) {
	for ctx.Err() == nil {
		c, err := dialFrom(ctx, pod, from(), clusterIP4)
		if err != nil {
			continue // refused
		}
		for i := 0; i < len(query)-1 && ctx.Err() == nil; i++ {
			if _, err := c.Write(query[i : i+1]); err != nil {
				break
			}
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
		c.Close()
	}
}

// malformed sends datagrams that are no queries as fast as it can, and returns
// how many of the answers are none of errors.
func (n *node) malformed(t *testing.T, from *lab.Pod, length time.Duration) (good int) {
	t.Helper()
	conn, err := from.Dial(t.Context(), "udp", clusterIP4.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	query, err := new(dns.Msg).SetQuestion(cachedName, dns.TypeA).SetEdns0(1232, true).Pack()
	if err != nil {
		t.Fatal(err)
	}
	mutate := []func(m []byte) []byte{
		func(m []byte) []byte { return m[:5] },
		func(m []byte) []byte { return m[:12] },
		func(m []byte) []byte { return m[:20] },                      // within the name
		func(m []byte) []byte { return m[:len(m)-3] },                // within OPT
		func(m []byte) []byte { m[2] |= 0x80; return m },             // an answer
		func(m []byte) []byte { m[2] |= 0x28; return m },             // an opcode that is none
		func(m []byte) []byte { m[5] = 2; return m },                 // two questions
		func(m []byte) []byte { m[5] = 0; return m },                 // none
		func(m []byte) []byte { m[7] = 9; return m },                 // answers in a query
		func(m []byte) []byte { m[12] = 0xc0; m[13] = 12; return m }, // a name that points to itself
		func(m []byte) []byte { m[12] = 77; return m },               // a label of 77 octets
		func(m []byte) []byte { m[11] = 40; return m },               // 40 records announced
		func(m []byte) []byte { return make([]byte, 1400) },
	}
	var answers, sent int
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 4096)
		for {
			k, err := conn.Read(buf)
			if err != nil {
				return
			}
			answers++
			if k >= 12 && buf[3]&0xf == dns.RcodeSuccess && buf[2]&0x80 != 0 {
				good++
			}
		}
	})
	end := time.Now().Add(length)
	for i := 0; time.Now().Before(end); i++ {
		m := append(make([]byte, 0, 2*len(query)), query...)
		binary.BigEndian.PutUint16(m, uint16(i))
		if _, err := conn.Write(mutate[i%len(mutate)](m)); err == nil {
			sent++
		}
	}
	_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	wg.Wait()
	t.Logf("%d sent, %d answers", sent, answers)
	if answers == 0 {
		t.Error("no answer at all: the flood did not arrive")
	}
	return good
}

// TestNodeForgedSources: one pod asks with every address of a large network, as if
// it were tens of thousands of clients. What is remembered of each is bounded, a
// client that is new is served, and nothing stays behind.
func TestNodeForgedSources(t *testing.T) {
	labtest.RequireSpeed(t)
	n := newNode(t)
	attacker := labtest.AddPod(t, n.Lab, "attacker")
	n.manyAddresses(attacker)
	d := n.start("a", "listen: []")
	defer d.stop()
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Fatal(err)
	}
	before := d.footprint()
	query, err := new(dns.Msg).SetQuestion(cachedName, dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	queries := d.metric("dnsguard_queries_total")
	const sources = 60_000
	err = attacker.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrInet4{Port: 53, Addr: clusterIP4.Addr().As4()}
		for i := range 2 * sources { // each twice
			at := i % sources
			info := unix.Inet4Pktinfo{Spec_dst: [4]byte{10, 245, byte(at >> 8), byte(at)}}
			if err := unix.Sendmsg(fd, query, unix.PktInfo4(&info), to, 0); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got := d.metric("dnsguard_queries_total") - queries
	newcomer := labtest.AddPod(t, n.Lab, "newcomer")
	hot := n.hotLoad(newcomer, false, 200, 2*time.Second)
	if lost := drive(t, []*stream{hot})(); lost > 0 {
		t.Errorf("a new client lost %d", lost)
	}
	t.Logf("%v of %d queries arrived, from %d addresses; %v clients are let past; the newcomer is taken: %v", got, 2*sources, sources,
		d.metric("dnsguard_intercept_bypassed_clients"), n.taken(newcomer, clusterIP4))
	if got < sources/2 {
		t.Errorf("only %v queries arrived", got)
	}
	before.heap += 16 << 20 // accounts of 65,536 clients at most, for five minutes
	d.settles(t, before)
	if page := d.page("/readyz"); !strings.HasPrefix(page, "ok") {
		t.Errorf("/readyz: %s", page)
	}
}
