package lab_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// shares asks over fresh ports and returns how many questions each pod got.
func shares(t *testing.T, from *lab.Namespace, network string, server netip.AddrPort, queries int, pods []*lab.DNSPod) []int {
	t.Helper()
	before := make([]int, len(pods))
	for i, p := range pods {
		udp, tcp := p.Server.Total()
		before[i] = udp + tcp
	}
	for range queries {
		mustAsk(t, from, network, server, echo)
	}
	got := make([]int, len(pods))
	for i, p := range pods {
		udp, tcp := p.Server.Total()
		got[i] = udp + tcp - before[i]
	}
	return got
}

// New ports are spread at random. With 64 queries over two endpoints, fewer
// than 8 for one of them happen once in 10^9 runs (binomial).
func TestServiceSplits(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	const queries, least = 64, 8
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		for _, from := range []*lab.Namespace{client.Namespace, l.Node.Namespace} {
			for _, network := range []string{"udp", "tcp"} {
				got := shares(t, from, network, l.DNS.Addr(is4), queries, pods)
				if got[0]+got[1] != queries || min(got[0], got[1]) < least {
					t.Errorf("from %v over %s: %v of %d", from, network, got, queries)
				}
			}
		}
	})
}

func TestSetEndpoints(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	const queries = 20
	clients := 0
	newClient := func() *lab.Pod { // whose ports no flow has yet that an older rule made
		clients++
		return labtest.AddPod(t, l, fmt.Sprintf("client-%d", clients))
	}
	wantAll := func(t *testing.T, is4 bool, pod int) {
		t.Helper()
		got := shares(t, newClient().Namespace, "udp", l.DNS.Addr(is4), queries, pods)
		if got[pod] != queries {
			t.Errorf("%v of %d, want all at %s", got, queries, pods[pod].Name)
		}
	}
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		set := func(pods ...*lab.DNSPod) {
			t.Helper()
			if err := l.DNS.SetEndpoints(lab.Endpoints(pods...)...); err != nil {
				t.Fatal(err)
			}
		}
		set(pods[1])
		wantAll(t, is4, 1)

		l.Node.Proxy.Hold()
		set(pods[0])
		wantAll(t, is4, 1)
		if err := l.Node.Proxy.Release(); err != nil {
			t.Fatal(err)
		}
		wantAll(t, is4, 0)

		set()
		for _, from := range []*lab.Namespace{newClient().Namespace, l.Node.Namespace} {
			for _, network := range []string{"udp", "tcp"} {
				_, err := ask(t, from, network, l.DNS.Addr(is4), echo, enough)
				// The kernel tells a local sender of the rejection at once (EPERM)
				// or by the ICMP error, whichever is first.
				if err == nil || errors.Is(err, lab.ErrTimeout) {
					t.Errorf("from %v over %s without endpoints: %v, want a rejection", from, network, err)
				}
			}
		}
		set(pods...)
	})
}

// While the rules are replaced over and over, no query may meet half of them.
func TestSwapLosesNothing(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	type outcome struct {
		result *lab.LoadResult
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		r, err := lab.Load{Server: l.DNS.Addr(true), Rate: 500, Queries: 500, Names: []string{echo}}.Run(t.Context(), client.Namespace)
		done <- outcome{r, err}
	}()
	swaps := 0
	for {
		select {
		case o := <-done:
			if o.err != nil {
				t.Fatal(o.err)
			}
			t.Logf("%d swaps: %v", swaps, o.result)
			if o.result.Failed() != 0 || swaps < 10 {
				t.Errorf("%d of %d queries failed in %d swaps", o.result.Failed(), o.result.Sent, swaps)
			}
			return
		default:
			swaps++
			if err := l.DNS.SetEndpoints(lab.Endpoints(pods[swaps%2])...); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Several Services live in one table, and each goes to its own endpoints.
func TestServicesAreApart(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	second := netip.MustParseAddrPort("10.96.0.11:5353")
	s, err := l.Node.Proxy.AddService("other", second)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SetEndpoints(lab.Endpoints(pods[1])...); err != nil {
		t.Fatal(err)
	}
	if err := l.DNS.SetEndpoints(lab.Endpoints(pods[0])...); err != nil {
		t.Fatal(err)
	}
	const queries = 10
	for i, server := range []netip.AddrPort{l.DNS.Addr(true), second} {
		if got := shares(t, client.Namespace, "udp", server, queries, pods); got[i] != queries {
			t.Errorf("%v: %v of %d", server, got, queries)
		}
	}
}

// The table has the name of kube-proxy's own, in both families, once.
func TestTableName(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	labtest.AddDNS(t, l, "dns-a")
	err := l.Node.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTables()
		if err != nil {
			return err
		}
		got := make(map[nftables.TableFamily]string)
		for _, table := range tables {
			got[table.Family] += table.Name
		}
		if got[nftables.TableFamilyIPv4] != "kube-proxy" || l.IPv6 && got[nftables.TableFamilyIPv6] != "kube-proxy" {
			t.Errorf("tables %v", got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The incident in small: a flow keeps its endpoint while its client keeps its
// port, whatever the rules say and although the endpoint is dead; each query
// renews it; once it is deleted the next query is answered.
func TestPinnedFlow(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		conn, err := client.Dial(t.Context(), "udp", l.DNS.Addr(is4).String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		flow := func() lab.Flow {
			t.Helper()
			f, ok, err := l.Node.FlowOf(addrPort(conn.LocalAddr()), l.DNS.Addr(is4))
			if err != nil || !ok {
				t.Fatalf("no flow: %v", err)
			}
			return f
		}
		askOn(t, conn, enough)
		first := flow()
		if !first.Replied || first.Timeout <= 0 || first.Timeout > 30*time.Second {
			t.Errorf("first flow %+v", first)
		}

		// A rule change alone does not move the flow: the other pod is the only
		// endpoint now, and gets nothing.
		serving, other := pods[0], pods[1]
		if endpoint(serving.Pod, is4) != first.Endpoint {
			serving, other = other, serving
		}
		if err := l.DNS.SetEndpoints(lab.Endpoints(other)...); err != nil {
			t.Fatal(err)
		}
		before, _ := other.Server.Total()
		askOn(t, conn, enough)
		if got, _ := other.Server.Total(); got != before {
			t.Error("the flow has moved to the new endpoint by itself")
		}

		// The endpoint stops answering (silently: the server stays for the next
		// family's turn): the flow still leads there.
		if err := serving.Server.SetFaults(lab.Faults{BlockUDP: true}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := tryOn(conn, brief); !errors.Is(err, lab.ErrTimeout) {
				t.Errorf("pinned query: %v, want ErrTimeout", err)
			}
		}
		mustAsk(t, client.Namespace, "udp", l.DNS.Addr(is4), echo) // a new port is fine
		if f := flow(); f.Endpoint != first.Endpoint {
			t.Errorf("flow moved to %v", f.Endpoint)
		}

		if err := l.Node.DeleteFlow(flow()); err != nil {
			t.Fatal(err)
		}
		askOn(t, conn, enough)
		if f := flow(); f.Endpoint != endpoint(other.Pod, is4) {
			t.Errorf("after the deletion the flow leads to %v, want %s", f.Endpoint, other.Name)
		}
		if err := serving.Server.SetFaults(lab.Faults{}); err != nil {
			t.Fatal(err)
		}
		if err := l.DNS.SetEndpoints(lab.Endpoints(pods...)...); err != nil {
			t.Fatal(err)
		}
	})
}
