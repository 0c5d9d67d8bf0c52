package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// libcCase is a name to look up, and what there is of it and of the names that
// a search for it passes. Each client has names of its own, so that nobody
// finds the cache warmed by another: % stands for the client.
type libcCase struct {
	what    string
	lookup  string
	records []string // owners absolute
	fails   []string // "name type": SERVFAIL
	found   string   // by glibc; empty: nothing
	// names is how many names the walk has, of which none is asked for both
	// families but the last; 0: it is no walk, or is another.
	names int
	// settled: a name is denied for one family and fails for the other. To us
	// it does not exist (RFC 8020 section 2), and every client finds what
	// glibc does; musl and c-ares alone may give up.
	settled bool
}

// libcCases are the cases. The list that is searched has four domains; a name
// as it is comes fifth.
func libcCases() []libcCase {
	many := func(owner string, n int) (records []string) {
		for i := range n {
			records = append(records, fmt.Sprintf("%s A 192.0.2.%d", owner, 100+i))
		}
		return records
	}
	addresses := func(n int) string {
		var all []netip.Addr
		for i := range n {
			all = append(all, netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + i)}))
		}
		return addressLine(all)
	}
	both := func(name string) []string { return []string{name + " A", name + " AAAA"} }
	return []libcCase{
		{
			what: "external, A and AAAA", lookup: "both-%.example.com", found: "192.0.2.1 2001:db8::1", names: 5,
			records: []string{"both-%.example.com. A 192.0.2.1", "both-%.example.com. AAAA 2001:db8::1"},
		},
		{
			what: "external, A only", lookup: "four-%.example.com", found: "192.0.2.2", names: 5,
			records: []string{"four-%.example.com. A 192.0.2.2"},
		},
		{
			what: "external, AAAA only", lookup: "six-%.example.com", found: "2001:db8::2", names: 5,
			records: []string{"six-%.example.com. AAAA 2001:db8::2"},
		},
		{
			what: "external, behind CNAMEs", lookup: "www-%.example.com", found: "192.0.2.3 2001:db8::3", names: 5,
			records: []string{
				"www-%.example.com. CNAME cdn-%.example.net.", "cdn-%.example.net. CNAME edge-%.example.net.",
				"edge-%.example.net. A 192.0.2.3", "edge-%.example.net. AAAA 2001:db8::3",
			},
		},
		{
			what: "external, TTL 0", lookup: "zero-%.example.com", found: "192.0.2.18 2001:db8::18", names: 5,
			records: []string{"zero-%.example.com. 0 A 192.0.2.18", "zero-%.example.com. 0 AAAA 2001:db8::18"},
		},
		{
			what: "external, 25 addresses", lookup: "many-%.example.com", found: addresses(25), names: 5,
			records: many("many-%.example.com.", 25),
		},
		// 512 octets have room for 29 addresses, but for 26 at most behind the
		// CNAME that ends a walk. Clients that know neither EDNS nor TCP
		// (busybox, musl before 1.2.4) use what fits.
		{
			what: "external, 28 addresses", lookup: "m28-%.example.com", found: addresses(28),
			records: many("m28-%.example.com.", 28),
		},
		{
			what: "external, 28 addresses and 2 of IPv6", lookup: "mixed-%.example.com", found: addresses(28) + " 2001:db8::19 2001:db8::20",
			records: append(many("mixed-%.example.com.", 28), "mixed-%.example.com. AAAA 2001:db8::19", "mixed-%.example.com. AAAA 2001:db8::20"),
		},
		{
			what: "external, 29 addresses", lookup: "m29-%.example.com", found: addresses(29),
			records: many("m29-%.example.com.", 29),
		},
		{
			what: "external, 60 addresses", lookup: "large-%.example.com", found: addresses(60),
			records: many("large-%.example.com.", 60),
		},
		{
			what: "headless Service of another namespace, 60 addresses", lookup: "huge-%.other", found: addresses(60),
			records: many("huge-%.other.svc.cluster.local.", 60),
		},
		{
			what: "Service of its namespace", lookup: "db-%", found: "10.96.1.1 fd00:10:96::1:1",
			records: []string{"db-%.shop.svc.cluster.local. A 10.96.1.1", "db-%.shop.svc.cluster.local. AAAA fd00:10:96::1:1"},
		},
		{
			what: "Service, svc.ns", lookup: "mq-%.other", found: "10.96.1.3 fd00:10:96::1:3", names: 2,
			records: []string{"mq-%.other.svc.cluster.local. A 10.96.1.3", "mq-%.other.svc.cluster.local. AAAA fd00:10:96::1:3"},
		},
		{
			what: "Service, svc.ns.svc", lookup: "kv-%.other.svc", found: "10.96.1.4", names: 3,
			records: []string{"kv-%.other.svc.cluster.local. A 10.96.1.4"},
		},
		{
			what: "headless pod", lookup: "web-0.web-%", found: "10.244.7.1", names: 1,
			records: []string{"web-0.web-%.shop.svc.cluster.local. A 10.244.7.1"},
		},
		{
			what: "headless pod of another namespace", lookup: "web-0.set-%.other.svc", found: "10.244.7.2", names: 3,
			records: []string{"web-0.set-%.other.svc.cluster.local. A 10.244.7.2"},
		},
		{
			what: "absent pod, absolute", lookup: "web-9.away-%.shop.svc.cluster.local.",
			records: []string{"away-%.shop.svc.cluster.local. A 10.244.7.3", "web-9.away-%.node.example. A 192.0.2.67"},
		},
		{
			what: "absent pod, and a host of its name", lookup: "web-9.gone-%", found: "192.0.2.68",
			records: []string{"gone-%.shop.svc.cluster.local. A 10.244.7.4", "web-9.gone-%.node.example. A 192.0.2.68"},
		},
		{
			what: "in the node's domain", lookup: "box-%.rack", found: "192.0.2.5", names: 4,
			records: []string{"box-%.rack.node.example. A 192.0.2.5"},
		},
		{what: "nowhere", lookup: "none-%.example.com", names: 5},
		{what: "nowhere, one label", lookup: "lone-%"},
		{
			what: "nowhere, ends like a Service that is", lookup: "www.shop.lost-%.uk", names: 5,
			records: []string{"www.shop.lost-%. A 192.0.2.66"},
		},
		{
			what: "NODATA, then data", lookup: "half-%.example.com", found: "192.0.2.6",
			records: []string{"half-%.example.com.svc.cluster.local. TXT x", "half-%.example.com. A 192.0.2.6"},
		},
		{
			what: "NODATA at the first, then data", lookup: "first-%.example.com", found: "192.0.2.7",
			records: []string{"first-%.example.com.shop.svc.cluster.local. TXT x", "first-%.example.com. A 192.0.2.7"},
		},
		{
			what: "NODATA, then nothing", lookup: "void-%.example.com",
			records: []string{"void-%.example.com.svc.cluster.local. TXT x"},
		},
		{
			what: "NODATA at the last", lookup: "empty-%.example.com", names: 5,
			records: []string{"empty-%.example.com. TXT x"},
		},
		{
			what: "A earlier, AAAA later", lookup: "split-%.example.com", found: "192.0.2.8", names: 2,
			records: []string{"split-%.example.com.svc.cluster.local. A 192.0.2.8", "split-%.example.com. AAAA 2001:db8::8"},
		},
		{
			what: "AAAA earlier, A later", lookup: "lips-%.example.com", found: "2001:db8::9", names: 2,
			records: []string{"lips-%.example.com.svc.cluster.local. AAAA 2001:db8::9", "lips-%.example.com. A 192.0.2.9"},
		},
		{
			what: "absolute", lookup: "abs-%.example.com.", found: "192.0.2.14",
			records: []string{"abs-%.example.com. A 192.0.2.14", "abs-%.example.com.shop.svc.cluster.local. A 192.0.2.99"},
		},
		{
			what: "absolute, of the cluster", lookup: "fqdn-%.other.svc.cluster.local.", found: "10.96.1.5",
			records: []string{"fqdn-%.other.svc.cluster.local. A 10.96.1.5"},
		},
		{
			what: "4 dots", lookup: "a.b.quad-%.example.com", found: "192.0.2.15", names: 5,
			records: []string{"a.b.quad-%.example.com. A 192.0.2.15"},
		},
		{
			what: "5 dots", lookup: "a.b.c.five-%.example.com", found: "192.0.2.16",
			records: []string{"a.b.c.five-%.example.com. A 192.0.2.16"},
		},
		{
			what: "5 dots, only in the list", lookup: "a.b.c.list-%.example.com", found: "192.0.2.17",
			records: []string{"a.b.c.list-%.example.com.shop.svc.cluster.local. A 192.0.2.17"},
		},
		{
			what: "AAAA fails", lookup: "v4-%.example.com", found: "192.0.2.4",
			records: []string{"v4-%.example.com. A 192.0.2.4"}, fails: []string{"v4-%.example.com. AAAA"},
		},
		{
			what: "A fails", lookup: "v6-%.example.com", found: "2001:db8::4",
			records: []string{"v6-%.example.com. AAAA 2001:db8::4"}, fails: []string{"v6-%.example.com. A"},
		},
		{
			what: "SERVFAIL, then data", lookup: "bad-%.example.com", found: "192.0.2.10",
			records: []string{"bad-%.example.com. A 192.0.2.10"}, fails: both("bad-%.example.com.svc.cluster.local."),
		},
		{
			what: "SERVFAIL at the first, then data", lookup: "worse-%.example.com", found: "192.0.2.11",
			records: []string{"worse-%.example.com. A 192.0.2.11"}, fails: both("worse-%.example.com.shop.svc.cluster.local."),
		},
		{
			what: "SERVFAIL, then nothing", lookup: "worst-%.example.com",
			fails: both("worst-%.example.com.svc.cluster.local."),
		},
		{
			what: "SERVFAIL at the last", lookup: "end-%.example.com",
			fails: both("end-%.example.com."),
		},
		{
			what: "A denied, AAAA fails, then data", lookup: "den4-%.example.com", found: "192.0.2.12 2001:db8::12", settled: true,
			records: []string{"den4-%.example.com. A 192.0.2.12", "den4-%.example.com. AAAA 2001:db8::12"},
			fails:   []string{"den4-%.example.com.svc.cluster.local. AAAA"},
		},
		{
			what: "AAAA denied, A fails, then data", lookup: "den6-%.example.com", found: "192.0.2.13 2001:db8::13", settled: true,
			records: []string{"den6-%.example.com. A 192.0.2.13", "den6-%.example.com. AAAA 2001:db8::13"},
			fails:   []string{"den6-%.example.com.svc.cluster.local. A"},
		},
	}
}

// forClient puts the client's name into the case's.
func (c libcCase) forClient(client string) libcCase {
	fill := func(all []string) (out []string) {
		for _, s := range all {
			out = append(out, strings.ReplaceAll(s, "%", client))
		}
		return out
	}
	c.lookup = strings.ReplaceAll(c.lookup, "%", client)
	c.records, c.fails = fill(c.records), fill(c.fails)
	return c
}

// mark returns the label that all names of a case and client have, and no
// others.
func (c libcCase) mark(client string) string {
	for label := range strings.SplitSeq(c.lookup, ".") {
		if strings.Contains(label, "%") {
			return strings.ReplaceAll(label, "%", client)
		}
	}
	panic("case " + c.what + " has no name of its own")
}

// libcWorld is the DNS outside of the node: the cluster's zone, the node's
// domain and everything else. It counts questions.
type libcWorld struct {
	zones *lab.DNSServer
	fails map[lab.Question]bool

	mu    sync.Mutex
	asked map[lab.Question]int
}

// newLibcWorld serves the cases' names in the pod.
func newLibcWorld(t *testing.T, pod *lab.Pod, clients []libcClient) *libcWorld {
	t.Helper()
	var cases []libcCase
	for _, client := range clients {
		for _, c := range libcCases() {
			cases = append(cases, c.forClient(client.name))
		}
	}
	w := &libcWorld{fails: map[lab.Question]bool{}, asked: map[lab.Question]int{}}
	origins := []string{"cluster.local.", "node.example.", "."} // the root last: the first that fits answers
	texts := map[string]*strings.Builder{}
	for _, origin := range origins {
		texts[origin] = new(strings.Builder)
		fmt.Fprintf(texts[origin], "$TTL 300\n%s SOA ns.dns. hostmaster. 1 7200 1800 86400 300\n", origin)
	}
	for _, c := range cases {
		for _, line := range c.records {
			for _, origin := range origins {
				if owner, _, _ := strings.Cut(line, " "); dns.IsSubDomain(origin, owner) {
					fmt.Fprintln(texts[origin], line)
					break
				}
			}
		}
		for _, line := range c.fails {
			name, qtype, _ := strings.Cut(line, " ")
			w.fails[lab.Question{Name: name, Type: dns.StringToType[qtype]}] = true
		}
	}
	var zones []*lab.Zone
	for _, origin := range origins {
		z, err := lab.ParseZone(origin, texts[origin].String())
		if err != nil {
			t.Fatal(err)
		}
		zones = append(zones, z)
	}
	var err error
	if w.zones, err = lab.NewDNSServer(t.Context(), pod.Namespace, zones); err != nil { // listens nowhere: see below
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.zones.Close() })
	addr := netip.AddrPortFrom(pod.IP4, 53).String()
	pc, err := pod.ListenPacket(t.Context(), "udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	l, err := pod.Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	servers := []*dns.Server{{PacketConn: pc, Handler: w}, {Listener: l, Handler: w}}
	var serving sync.WaitGroup
	for _, s := range servers {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		serving.Go(func() {
			if err := s.ActivateAndServe(); err != nil {
				t.Errorf("serve the world: %v", err)
			}
		})
		<-started
	}
	t.Cleanup(func() {
		for _, s := range servers {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
		}
		serving.Wait()
	})
	return w
}

// ServeDNS answers one query.
func (w *libcWorld) ServeDNS(to dns.ResponseWriter, query *dns.Msg) {
	if len(query.Question) != 1 {
		return
	}
	q := lab.Question{Name: dns.CanonicalName(query.Question[0].Name), Type: query.Question[0].Qtype}
	w.mu.Lock()
	w.asked[q]++
	w.mu.Unlock()
	if w.fails[q] {
		_ = to.WriteMsg(new(dns.Msg).SetRcode(query, dns.RcodeServerFailure))
		return
	}
	w.zones.ServeDNS(to, query)
}

// count returns the questions about names with the label since it was last
// called for them.
func (w *libcWorld) count(label string) map[lab.Question]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	asked := map[lab.Question]int{}
	for q, n := range w.asked {
		if slices.Contains(strings.Split(q.Name, "."), label) {
			asked[q] = n
			delete(w.asked, q)
		}
	}
	return asked
}
