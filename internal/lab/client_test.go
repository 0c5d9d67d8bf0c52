package lab_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.UDPAddr).AddrPort() }

// tryOn asks once on a given UDP socket.
func tryOn(conn net.Conn, timeout time.Duration) error {
	query := new(dns.Msg).SetQuestion(echo+".", dns.TypeA)
	packed, err := query.Pack()
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := conn.Write(packed); err != nil {
		return err
	}
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, err := conn.Read(buf)
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			return lab.ErrTimeout
		}
		if err != nil {
			return err
		}
		var reply dns.Msg
		if err := reply.Unpack(buf[:n]); err != nil {
			return err
		}
		if reply.Id == query.Id {
			return nil
		}
	}
}

func askOn(t *testing.T, conn net.Conn, timeout time.Duration) {
	t.Helper()
	if err := tryOn(conn, timeout); err != nil {
		t.Fatal(err)
	}
}

// runUntil runs a client until as many outcomes are known.
func runUntil(t *testing.T, outcomes int, start func(cfg lab.ClientConfig) *lab.Client, cfg lab.ClientConfig) lab.Timeline {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	var seen atomic.Int64
	cfg.Observe = func(lab.Outcome) {
		if seen.Add(1) == int64(outcomes) {
			cancel()
		}
	}
	timeline := start(cfg).Run(ctx)
	if len(timeline) < outcomes {
		t.Fatalf("only %d outcomes", len(timeline))
	}
	if int(seen.Load()) != len(timeline) {
		t.Errorf("%d outcomes observed, %d in the timeline", seen.Load(), len(timeline))
	}
	for i, o := range timeline {
		if o.Seq != i || o.Name != cfg.Name(i) {
			t.Errorf("outcome %d is %d, %s", i, o.Seq, o.Name)
		}
	}
	return timeline
}

func uncached(seq int) string { return fmt.Sprintf("q%d.uncached.example.com.", seq) }

func TestPinnedClientKeepsItsPort(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	var local netip.AddrPort
	timeline := runUntil(t, 20, func(cfg lab.ClientConfig) *lab.Client {
		p, err := lab.NewPinnedClient(t.Context(), client.Namespace, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		local = p.Local
		return p.Client
	}, lab.ClientConfig{Server: l.DNS.Addr(true), Interval: 5 * time.Millisecond, Timeout: enough, Name: uncached})
	if timeline.Failed() != 0 {
		t.Errorf("%d failed: %+v", timeline.Failed(), timeline)
	}
	flows, err := l.Node.Flows()
	if err != nil {
		t.Fatal(err)
	}
	if len(flows) != 1 || flows[0].Client != local {
		t.Errorf("flows %v, want one of %v", flows, local)
	}
	a, _ := pods[0].Server.Total()
	b, _ := pods[1].Server.Total()
	if a*b != 0 || a+b != len(timeline) {
		t.Errorf("%d questions at one pod, %d at the other", a, b)
	}
}

func TestFreshClientChangesItsPort(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	timeline := runUntil(t, 20, func(cfg lab.ClientConfig) *lab.Client {
		return lab.NewFreshClient(client.Namespace, cfg)
	}, lab.ClientConfig{Server: l.DNS.Addr(true), Interval: 5 * time.Millisecond, Timeout: enough, Name: uncached})
	if timeline.Failed() != 0 {
		t.Errorf("%d failed: %+v", timeline.Failed(), timeline)
	}
	flows, err := l.Node.Flows()
	if err != nil {
		t.Fatal(err)
	}
	// A port may come twice by chance.
	if len(flows) < len(timeline)-2 || len(flows) > len(timeline) {
		t.Errorf("%d flows of %d queries", len(flows), len(timeline))
	}
}

// Each way to fail is told apart by both kinds of client.
func TestClientFailures(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	client := labtest.AddPod(t, l, "client")
	kinds := map[string]func(t *testing.T, cfg lab.ClientConfig) *lab.Client{
		"pinned": func(t *testing.T, cfg lab.ClientConfig) *lab.Client {
			p, err := lab.NewPinnedClient(t.Context(), client.Namespace, cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close() })
			return p.Client
		},
		"fresh": func(_ *testing.T, cfg lab.ClientConfig) *lab.Client { return lab.NewFreshClient(client.Namespace, cfg) },
	}
	cases := []struct {
		name    string
		faults  lab.Faults
		qname   string
		timeout time.Duration
		want    error
	}{
		{"answered", lab.Faults{}, echo, enough, nil},
		{"slow", lab.Faults{Delay: time.Minute}, echo, brief, lab.ErrTimeout},
		{"silent", lab.Faults{Silent: true}, echo, brief, lab.ErrTimeout},
		{"blocked", lab.Faults{BlockUDP: true}, echo, brief, lab.ErrTimeout},
		{"servfail", lab.Faults{Rcode: dns.RcodeServerFailure}, echo, enough, lab.RcodeError(dns.RcodeServerFailure)},
		{"nxdomain", lab.Faults{}, "nobody.default.svc.cluster.local", enough, lab.RcodeError(dns.RcodeNameError)},
		{"nodata", lab.Faults{}, "_dns._udp.kube-dns.kube-system.svc.cluster.local", enough, lab.ErrMismatch},
		{"truncated", lab.Faults{Truncate: true}, echo, enough, lab.ErrMismatch},
	}
	for kind, start := range kinds {
		for _, c := range cases {
			t.Run(kind+"/"+c.name, func(t *testing.T) {
				if err := pod.Server.SetFaults(c.faults); err != nil {
					t.Fatal(err)
				}
				timeline := runUntil(t, 2, func(cfg lab.ClientConfig) *lab.Client { return start(t, cfg) }, lab.ClientConfig{
					Server: l.DNS.Addr(true), Interval: 10 * time.Millisecond, Timeout: c.timeout,
					Name: func(int) string { return c.qname + "." },
				})
				for _, o := range timeline {
					if !errors.Is(o.Err, c.want) {
						t.Errorf("outcome %+v, want %v", o, c.want)
					}
				}
			})
		}
		t.Run(kind+"/refused", func(t *testing.T) {
			timeline := runUntil(t, 2, func(cfg lab.ClientConfig) *lab.Client { return start(t, cfg) }, lab.ClientConfig{
				Server: netip.AddrPortFrom(client.IP4, 53), Interval: 10 * time.Millisecond, Timeout: enough, Name: uncached,
			})
			for _, o := range timeline {
				if !errors.Is(o.Err, lab.ErrRefused) {
					t.Errorf("outcome %+v, want ErrRefused", o)
				}
			}
		})
	}
}
