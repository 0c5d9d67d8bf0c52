package lab_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// Every form of the load, against servers that answer: nothing is lost, every
// question arrives once, and the sockets are as many as asked for.
func TestLoad(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	names := []string{echo, "api.example.com", "many.prod.svc.cluster.local"}
	cases := []struct {
		name string
		load lab.Load
	}{
		{"udp, four ports", lab.Load{Sockets: 4}},
		{"udp, a port each", lab.Load{}},
		{"tcp, four connections", lab.Load{TCP: true, Sockets: 4}},
		{"tcp, a connection each", lab.Load{TCP: true}},
	}
	eachFamily(t, l, func(t *testing.T, is4 bool) {
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				const queries = 300
				before := countAll(pods)
				load := c.load
				load.Server, load.Rate, load.Queries, load.Names = l.DNS.Addr(is4), 1000, queries, names
				r, err := load.Run(t.Context(), client.Namespace)
				if err != nil {
					t.Fatal(err)
				}
				t.Log(r)
				if r.Sent != queries || r.Answered != queries || r.Failed() != 0 || r.Stray != 0 {
					t.Errorf("%v", r)
				}
				if from, length := r.LongestOutage(); length != 0 {
					t.Errorf("outage of %v at %v", length, from)
				}
				if r.Percentile(50) <= 0 || r.Percentile(50) > r.Percentile(100) {
					t.Errorf("percentiles %v, %v", r.Percentile(50), r.Percentile(100))
				}
				// Sent on time, not before: the last was due at (queries - 1) ms.
				if r.Elapsed < (queries-1)*time.Millisecond {
					t.Errorf("took %v", r.Elapsed)
				}
				for _, name := range names {
					q := lab.Question{Name: dns.CanonicalName(name), Type: dns.TypeA}
					if got := countAll(pods)[q] - before[q]; got != queries/len(names) {
						t.Errorf("%s was asked %d times, want %d", name, got, queries/len(names))
					}
				}
			})
		}
	})
}

// countAll adds the counts of several servers.
func countAll(pods []*lab.DNSPod) map[lab.Question]int {
	sum := make(map[lab.Question]int)
	for _, p := range pods {
		for q, n := range p.Server.Counts() {
			sum[q] += n
		}
	}
	return sum
}

func TestLoadUsesItsSockets(t *testing.T) {
	labtest.CheckLeaks(t)
	for _, sockets := range []int{1, 3, 0} {
		l := labtest.New(t)
		labtest.AddDNS(t, l, "dns-a")
		client := labtest.AddPod(t, l, "client")
		const queries = 60
		if _, err := (lab.Load{Server: l.DNS.Addr(true), Rate: 1000, Queries: queries, Sockets: sockets, Names: []string{echo}}).Run(t.Context(), client.Namespace); err != nil {
			t.Fatal(err)
		}
		flows, err := l.Node.Flows()
		if err != nil {
			t.Fatal(err)
		}
		want, slack := sockets, 0
		if sockets == 0 {
			want, slack = queries, 4 // a port may come again by chance
		}
		if len(flows) > want || len(flows) < want-slack {
			t.Errorf("%d sockets: %d flows, want %d", sockets, len(flows), want)
		}
	}
}

func TestLoadUnique(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	client := labtest.AddPod(t, l, "client")
	const queries = 120
	r, err := lab.Load{
		Server: l.DNS.Addr(true), Rate: 2000, Queries: queries, Sockets: 2, Unique: true,
		Names: []string{"uncached.example.com", "uncached.svc.cluster.local"},
	}.Run(t.Context(), client.Namespace)
	if err != nil {
		t.Fatal(err)
	}
	counts := pod.Server.Counts()
	if r.Answered != queries || len(counts) != queries {
		t.Errorf("%v; %d different questions", r, len(counts))
	}
	if counts[lab.Question{Name: "00000119.uncached.svc.cluster.local.", Type: dns.TypeA}] != 1 {
		t.Errorf("the last name was not asked: %v", counts)
	}
}

// What goes wrong is counted as what it is.
func TestLoadFailures(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pod := labtest.AddDNS(t, l, "dns-a")[0]
	client := labtest.AddPod(t, l, "client")
	nobody := netip.AddrPortFrom(client.IP4, 53)
	const queries = 50
	cases := []struct {
		name   string
		faults lab.Faults
		qname  string
		server netip.AddrPort
		tcp    bool
		check  func(r *lab.LoadResult) bool
	}{
		{"silent", lab.Faults{Silent: true}, echo, l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Lost == queries && r.Refused == 0 }},
		{"silent, tcp", lab.Faults{Silent: true}, echo, l.DNS.Addr(true), true, func(r *lab.LoadResult) bool { return r.Lost == queries }},
		{"blocked, tcp", lab.Faults{BlockTCP: true}, echo, l.DNS.Addr(true), true, func(r *lab.LoadResult) bool { return r.Lost == queries }},
		{"servfail", lab.Faults{Rcode: dns.RcodeServerFailure}, echo, l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Rcodes[dns.RcodeServerFailure] == queries }},
		{"nxdomain", lab.Faults{}, "nobody.example.com", l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Rcodes[dns.RcodeNameError] == queries }},
		{"nodata", lab.Faults{}, "_dns._udp.kube-dns.kube-system.svc.cluster.local", l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Wrong == queries }},
		{"truncated", lab.Faults{Truncate: true}, echo, l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Wrong == queries }},
		{"late", lab.Faults{Delay: 250 * time.Millisecond}, echo, l.DNS.Addr(true), false, func(r *lab.LoadResult) bool { return r.Lost == queries }},
		{"refused", lab.Faults{}, echo, nobody, false, func(r *lab.LoadResult) bool { return r.Lost == queries && r.Refused > 0 }},
		{"refused, tcp", lab.Faults{}, echo, nobody, true, func(r *lab.LoadResult) bool { return r.Lost == queries && r.Refused == queries }},
	}
	for _, c := range cases {
		for _, sockets := range []int{0, 2} {
			if err := pod.Server.SetFaults(c.faults); err != nil {
				t.Fatal(err)
			}
			r, err := lab.Load{
				Server: c.server, TCP: c.tcp, Rate: 1000, Queries: queries, Sockets: sockets,
				Names: []string{c.qname}, Timeout: 200 * time.Millisecond,
			}.Run(t.Context(), client.Namespace)
			if err != nil {
				t.Fatal(err)
			}
			if !c.check(r) || r.Answered != 0 || r.Failed() != queries {
				t.Errorf("%s, %d sockets: %v", c.name, sockets, r)
			}
			if _, length := r.LongestOutage(); length != queries*time.Millisecond {
				t.Errorf("%s: longest outage %v", c.name, length)
			}
		}
	}
}

// A pod dies in the middle of a load from one port: everything after that is
// lost, also when the rules have changed, while new ports lose nothing then.
func TestLoadSeesAnOutage(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	pods := labtest.AddDNS(t, l, "dns-a", "dns-b")
	client := labtest.AddPod(t, l, "client")
	const queries, rate = 2000, 500
	load := lab.Load{Server: l.DNS.Addr(true), Rate: rate, Queries: queries, Sockets: 1, Names: []string{echo}}
	result := make(chan *lab.LoadResult, 1)
	go func() {
		r, err := load.Run(t.Context(), client.Namespace)
		if err != nil {
			t.Error(err)
		}
		result <- r
	}()
	serving := -1
	for serving < 0 { // until the load is well under way
		time.Sleep(time.Millisecond)
		serving = slices.IndexFunc(pods, func(p *lab.DNSPod) bool {
			udp, _ := p.Server.Total()
			return udp > rate/4
		})
	}
	if err := pods[serving].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := l.DNS.SetEndpoints(lab.Endpoints(pods[1-serving])...); err != nil {
		t.Fatal(err)
	}
	fresh := load
	fresh.Sockets, fresh.Queries = 0, rate/2
	f, err := fresh.Run(t.Context(), client.Namespace)
	if err != nil {
		t.Fatal(err)
	}
	k := <-result
	t.Logf("one port kept:   %v", k)
	t.Logf("a new port each: %v", f)
	if f.Failed() != 0 {
		t.Errorf("new ports lost %d", f.Failed())
	}
	const interval = time.Second / rate
	if from, length := k.LongestOutage(); k.Answered == 0 || from+length != queries*interval || length < interval {
		t.Errorf("the outage of the kept port is %v at %v, want one to the end", length, from)
	}
}

func TestLoadIsBounded(t *testing.T) {
	labtest.CheckLeaks(t)
	l := labtest.New(t)
	labtest.AddDNS(t, l, "dns-a")
	client := labtest.AddPod(t, l, "client")
	good := lab.Load{Server: l.DNS.Addr(true), Rate: 100, Queries: 10000, Sockets: 1, Names: []string{echo}}

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	r, err := good.Run(ctx, client.Namespace)
	if !errors.Is(err, context.DeadlineExceeded) || r.Sent == 0 || r.Sent > 1000 {
		t.Errorf("interrupted: %v, %v", r, err)
	}
	for name, spoil := range map[string]func(*lab.Load){
		"no server":        func(l *lab.Load) { l.Server = netip.AddrPort{} },
		"no rate":          func(l *lab.Load) { l.Rate = 0 },
		"no end":           func(l *lab.Load) { l.Queries = 0 },
		"negative sockets": func(l *lab.Load) { l.Sockets = -1 },
		"no names":         func(l *lab.Load) { l.Names = nil },
		"bad name":         func(l *lab.Load) { l.Names = []string{"a..b"} },
		"ids run out":      func(l *lab.Load) { l.Rate, l.Timeout = 20000, 4*time.Second },
	} {
		bad := good
		spoil(&bad)
		if _, err := bad.Run(t.Context(), client.Namespace); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// BenchmarkLoad tells what a query costs the generator: its own thread's CPU
// time, and the latency of the whole path at the given rate.
func BenchmarkLoad(b *testing.B) {
	for _, c := range []struct {
		name string
		load lab.Load
	}{
		{"udp/kept", lab.Load{Rate: 10000, Sockets: 4}},
		{"udp/fresh", lab.Load{Rate: 10000}},
		{"tcp/kept", lab.Load{Rate: 5000, Sockets: 4, TCP: true}},
	} {
		b.Run(c.name, func(b *testing.B) {
			l := labtest.New(b)
			pod := labtest.AddDNS(b, l, "dns-a")[0]
			client := labtest.AddPod(b, l, "client")
			load := c.load
			load.Server, load.Names, load.Queries = endpoint(pod.Pod, true), []string{echo}, 10000
			for b.Loop() {
				r, err := load.Run(b.Context(), client.Namespace)
				if err != nil {
					b.Fatal(err)
				}
				b.Log(r)
				b.ReportMetric(float64(r.CPU.Nanoseconds())/float64(r.Sent), "cpu-ns/query")
				b.ReportMetric(float64(r.Failed()), "failed")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
