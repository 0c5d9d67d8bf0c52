package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/search"
)

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// freeAddr returns an address on loopback that nobody else takes: a host of
// 127.0.0.0/8 of its own. A port of 127.0.0.1 that is free now may be anybody's by the
// time it is bound.
func freeAddr() netip.AddrPort {
	host := rand.Uint32()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(host >> 16), byte(host >> 8), 2 + byte(host)&0x7f}), 5300)
}

// startUpstream serves one address record for every name.
func startUpstream(t *testing.T, address string) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		rr, err := dns.NewRR(fmt.Sprintf("%s 60 IN A %s", q.Question[0].Name, address))
		if err != nil {
			t.Error(err)
		}
		m.Answer = []dns.RR{rr}
		_ = w.WriteMsg(m)
	})}
	done := make(chan error)
	go func() { done <- s.ActivateAndServe() }()
	t.Cleanup(func() {
		_ = s.Shutdown()
		<-done
	})
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// lines collects what a daemon logs.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// running is a daemon under test.
type running struct {
	t       *testing.T
	log     *lines
	file    string
	control string
	listen  netip.AddrPort
	http    string
	end     context.CancelFunc
	code    chan int
}

// start runs `dnsguard run` on a configuration file, in this process.
func start(t *testing.T, upstream netip.AddrPort) *running {
	t.Helper()
	r := &running{
		t: t, log: new(lines), listen: freeAddr(), http: freeAddr().String(),
		control: filepath.Join(t.TempDir(), "control.sock"), code: make(chan int, 1),
	}
	r.file = writeFile(t, "config.yaml", r.configuration(r.listen, upstream, ""))
	ctx, cancel := context.WithCancel(context.Background())
	r.end = cancel
	go func() {
		r.code <- dispatch(ctx, &cli{out: io.Discard, err: r.log}, []string{"run", "--config", r.file})
	}()
	t.Cleanup(func() {
		cancel()
		r.exited()
	})
	r.eventually("ready", func() bool { body, err := r.page("/readyz"); return err == nil && body == "ok" })
	return r
}

func (r *running) configuration(listen, upstream netip.AddrPort, more string) string {
	return fmt.Sprintf("listen: [%v]\nhttp: %q\ncontrol: %s\nkubernetes: {source: none}\nupstreams: [{zones: [.], servers: [%v]}]\nlog: {format: text}\n%s", listen, r.http, r.control, upstream, more)
}

// rewrite replaces the configuration file as editors do.
func (r *running) rewrite(text string) {
	r.t.Helper()
	next := r.file + ".new"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(next, r.file); err != nil {
		r.t.Fatal(err)
	}
}

// hangup has the daemon read its file now, which is sooner than that it looks.
func (r *running) hangup() {
	r.t.Helper()
	told := make(chan os.Signal, 1) // one without a listener would end this process
	signal.Notify(told, syscall.SIGHUP)
	defer signal.Stop(told)
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		r.t.Fatal(err)
	}
	<-told
}

// exited ends the daemon, if it has not ended, and returns its exit code.
func (r *running) exited() int {
	r.end()
	code := <-r.code
	r.code <- code
	return code
}

// eventually waits for what other processes would see at some time.
func (r *running) eventually(what string, is func() bool) {
	r.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !is() {
		select {
		case code := <-r.code:
			r.t.Fatalf("the daemon ended with code %d before it was %s:\n%s", code, what, r.log)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("not %s in 20 s:\n%s", what, r.log)
		}
	}
}

// page gets a page over the control socket.
func (r *running) page(path string) (string, error) {
	return askDaemon(r.t.Context(), r.control, path)
}

// lookup returns the address that the daemon gives for a name.
func (r *running) lookup(network string, server netip.AddrPort, name string) string {
	r.t.Helper()
	q := new(dns.Msg)
	q.SetQuestion(name, dns.TypeA)
	m, _, err := (&dns.Client{Net: network, Timeout: 5 * time.Second}).Exchange(q, server.String())
	if err != nil {
		return err.Error()
	}
	if len(m.Answer) != 1 {
		return dns.RcodeToString[m.Rcode]
	}
	return m.Answer[0].(*dns.A).A.String()
}

// TestRun is the life of a daemon: answers, pages, reloads good and bad, its
// end.
func TestRun(t *testing.T) {
	first, second := startUpstream(t, "192.0.2.1"), startUpstream(t, "192.0.2.2")
	r := start(t, first)
	for _, network := range []string{"udp", "tcp"} {
		if got := r.lookup(network, r.listen, "www.example.com."); got != "192.0.2.1" {
			t.Errorf("%s: %s", network, got)
		}
	}

	t.Run("health", func(t *testing.T) {
		for _, args := range [][]string{{"health"}, {"health", "--ready"}} {
			if code, out, err := dispatched(t, append(args, "--control", r.control)...); code != exitOK || out != "ok\n" {
				t.Errorf("%v: code %d, %q, %q", args, code, out, err)
			}
		}
	})

	t.Run("explain", func(t *testing.T) {
		code, out, err := dispatched(t, "explain", "www.example.com", "--namespace", "shop", "--control", r.control)
		if code != exitOK || !strings.Contains(out, "as seen by the running daemon") ||
			!strings.Contains(out, "www.example.com.shop.svc.cluster.local.") || !strings.Contains(out, "192.0.2.1") {
			t.Errorf("code %d: %s\n%s", code, err, out)
		}
		code, out, err = dispatched(t, "explain", "www.example.com.", "-o", "json", "--control", r.control)
		var x resolver.Explanation
		if jerr := json.Unmarshal([]byte(out), &x); code != exitOK || jerr != nil || len(x.Steps) != 1 || !x.Steps[0].States[0].Cached {
			t.Errorf("code %d: %s, %v\n%s", code, err, jerr, out)
		}
		if code, _, err := dispatched(t, "explain", "a..b", "--control", r.control); code != exitUsage || !strings.Contains(err, "a..b") {
			t.Errorf("code %d: %s", code, err)
		}
	})

	t.Run("statusz", func(t *testing.T) {
		text, err := r.page("/statusz")
		if err != nil || !strings.Contains(text, r.listen.String()) || !strings.Contains(text, first.String()) {
			t.Errorf("%v:\n%s", err, text)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.http+"/statusz", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || !regexp.MustCompile(`"udp": \d+`).Match(body) || resp.StatusCode != http.StatusOK {
			t.Errorf("%v, %s:\n%s", err, resp.Status, body)
		}
	})

	t.Run("metrics", func(t *testing.T) {
		text, err := r.page("/metrics")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range contractMetrics() {
			if !strings.Contains(text, "\n# TYPE dnsguard_"+name+" ") {
				t.Errorf("no metric dnsguard_%s", name)
			}
		}
		for _, sample := range []string{`dnsguard_queries_total{transport="tcp"} 1`, `dnsguard_cache_hits_total{kind="positive"} 1`, `dnsguard_config_reloads_total{result="failure"} 0`} {
			if !strings.Contains(text, sample) {
				t.Errorf("no sample %s", sample)
			}
		}
		problems, err := testutil.CollectAndLint(&collector{r.daemon(t)})
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		if err != nil {
			t.Error(err)
		}
	})

	t.Run("reload", func(t *testing.T) {
		// Bad: it is refused whole, said by an unready pod, and the old one answers
		// on. The process stays alive.
		unready := func(key string) func() bool {
			return func() bool {
				_, err := r.page("/readyz")
				return err != nil && strings.HasPrefix(err.Error(), "config: the latest configuration was refused") && strings.Contains(err.Error(), key)
			}
		}
		r.rewrite(r.configuration(r.listen, second, "cache: {size: none}\n"))
		r.eventually("unready", unready("cache.size"))
		if body, err := r.page("/healthz"); err != nil || body != "ok" {
			t.Errorf("a refused configuration would have it killed: %q, %v", body, err)
		}
		if got := r.lookup("udp", r.listen, "bad.example.com."); got != "192.0.2.1" {
			t.Errorf("after a bad configuration: %s", got)
		}
		if text, err := r.page("/metrics"); err != nil || !strings.Contains(text, `dnsguard_config_reloads_total{result="failure"} 1`) {
			t.Errorf("the failure is not counted: %v", err)
		}
		// Right, but for a process that starts: a warning and a metric, and the pod
		// stays ready. What else is new in the file waits with it.
		waits := func() bool {
			text, err := r.page("/metrics")
			return err == nil && strings.Contains(text, "\ndnsguard_config_restart_required 1\n")
		}
		r.rewrite(r.configuration(freeAddr(), second, "intercept: {mark: 0x300}\n"))
		r.hangup()
		r.eventually("waiting for a restart", waits)
		const warning = "these keys change only with a restart: intercept.mark"
		r.eventually("ready, with a warning", func() bool {
			body, err := r.page("/readyz")
			return err == nil && strings.HasPrefix(body, "ok") && strings.Contains(body, warning)
		})
		if got := r.lookup("udp", r.listen, "bad.example.org."); got != "192.0.2.1" {
			t.Errorf("while a configuration waits for a restart: %s", got)
		}
		if text, err := r.page("/metrics"); err != nil || !strings.Contains(text, `dnsguard_config_reloads_total{result="failure"} 1`) || !strings.Contains(text, "\ndnsguard_ready 1\n") {
			t.Errorf("what waits is a failure: %v\n%s", err, text)
		}
		if text, err := r.page("/statusz"); err != nil || !strings.Contains(text, warning) {
			t.Errorf("/statusz does not say what waits: %v\n%s", err, text)
		}
		// An address that cannot be had: it is refused, although the file is right.
		r.rewrite(r.configuration(netip.MustParseAddrPort("192.0.2.53:53"), second, ""))
		r.hangup()
		r.eventually("unready", unready("192.0.2.53"))
		if _, err := r.page("/readyz"); err == nil || strings.Contains(err.Error(), warning) || waits() {
			t.Errorf("what has been replaced still waits: %v", err)
		}
		if got := r.lookup("udp", r.listen, "bad.example.net."); got != "192.0.2.1" {
			t.Errorf("after an address that cannot be had: %s", got)
		}
		// Good: another address, another upstream. Somebody has it at first; that he goes
		// changes nothing in the file, so that it takes a SIGHUP.
		moved := freeAddr()
		held, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(moved))
		if err != nil {
			t.Fatal(err)
		}
		r.rewrite(r.configuration(moved, second, ""))
		r.eventually("unready", unready(moved.String()))
		_ = held.Close()
		r.hangup()
		r.eventually("moved", func() bool { return r.lookup("udp", moved, "good.example.com.") == "192.0.2.2" })
		r.eventually("gone from the old address", func() bool {
			return strings.Contains(r.log.String(), "no longer serving")
		})
		r.eventually("ready again", func() bool { body, err := r.page("/readyz"); return err == nil && body == "ok" })
		if got := r.lookup("udp", moved, "www.example.com."); got != "192.0.2.1" {
			t.Errorf("the cache did not survive: %s", got)
		}
		if text, err := r.page("/metrics"); err != nil || !strings.Contains(text, `dnsguard_upstream_queries_total{transport="udp",upstream="`+first.String()+`"}`) {
			t.Errorf("the old upstream's counts are lost: %v", err)
		}
	})

	if code := r.exited(); code != exitOK {
		t.Errorf("exit code %d:\n%s", code, r.log)
	}
	if _, err := os.Stat(r.control); !os.IsNotExist(err) {
		t.Errorf("the control socket is still there: %v", err)
	}
}

// daemon makes a daemon that serves nothing, for its collector.
func (r *running) daemon(t *testing.T) *daemon {
	t.Helper()
	cfg, err := config.Parse("", []byte(r.configuration(freeAddr(), netip.MustParseAddrPort("127.0.0.1:9"), "")), nil)
	if err != nil {
		t.Fatal(err)
	}
	log, level := newLogger(io.Discard, cfg.Log)
	d, err := newDaemon(t.Context(), cfg, log, level)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closeAll(d.endpoints)
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// clusterDaemon makes a daemon that serves nothing and follows the API server at a
// URL as node nod-1.
func clusterDaemon(t *testing.T, url string) *daemon {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: '" + url + "'}}]\nusers: [{name: u, user: {token: t}}]\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Parse("", fmt.Appendf(nil, "listen: ['%v']\nupstreams: [{servers: ['127.0.0.1:9']}]\nkubernetes: {kubeconfig: %s, nodeName: nod-1}\nguard: {enabled: false}\n", freeAddr(), kubeconfig), nil)
	if err != nil {
		t.Fatal(err)
	}
	log, level := newLogger(io.Discard, cfg.Log)
	d, err := newDaemon(t.Context(), cfg, log, level)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closeAll(d.endpoints)
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestMissingPermission: it is a reason not to be ready, and names verb and resource.
func TestMissingPermission(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		verb, resource := "list", path.Base(r.URL.Path)
		if r.URL.Query().Get("watch") != "" {
			verb = "watch"
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%[2]s is forbidden: User \"system:serviceaccount:kube-system:dnsguard\" cannot %[1]s resource \"%[2]s\" in API group \"\""}`, verb, resource)
	}))
	defer api.Close()
	d := clusterDaemon(t, api.URL)
	reason := regexp.MustCompile(`^kubernetes: not read yet: (services|pods|namespaces)\b.* cannot (list|watch) resource "(services|pods|namespaces)"`)
	await(t, "the reason", func() bool {
		reasons, _ := d.conditions.get()
		return slices.ContainsFunc(reasons, reason.MatchString)
	})
}

// TestClusterProblems: what the cluster does not have is said by name.
func TestClusterProblems(t *testing.T) {
	d := clusterDaemon(t, "https://127.0.0.1:1")
	warned := func(want ...string) {
		t.Helper()
		_, warnings := d.conditions.get()
		for i, text := range want {
			if i >= len(warnings) || !strings.Contains(warnings[i], text) {
				t.Errorf("warnings %q, want %q", warnings, want)
			}
		}
		if len(warnings) != len(want) {
			t.Errorf("warnings %q, want %q", warnings, want)
		}
	}
	missing := []kube.Name{{Namespace: "kube-system", Name: "kube-dns"}}
	d.onCluster(&kube.State{Missing: missing})
	warned("no such Service: kube-system/kube-dns")
	d.onCluster(&kube.State{Clients: map[netip.Addr]*search.List{}, Missing: missing})
	warned(`no pod is on node "nod-1"`, "no such Service: kube-system/kube-dns")
	d.onCluster(&kube.State{Clients: map[netip.Addr]*search.List{netip.MustParseAddr("172.30.0.2"): nil}, Missing: missing})
	if own := interfaceAddrs(); len(own) > 0 {
		warned(`no pod on node "nod-1" (kubernetes.nodeName, $NODE_NAME) has an address of this machine`, "no such Service: kube-system/kube-dns")
		d.onCluster(&kube.State{Clients: map[netip.Addr]*search.List{own[0]: nil}})
	}
	d.onCluster(&kube.State{Clients: map[netip.Addr]*search.List{netip.MustParseAddr("172.30.0.2"): nil}})
	warned()
}

// TestServiceDeleted: a DNS Service that is deleted keeps the addresses that the cluster
// told last, whatever the environment says, until it has others. One that never was has
// none, or the environment's.
func TestServiceDeleted(t *testing.T) {
	d := clusterDaemon(t, "https://127.0.0.1:1")
	told := func(what string, heard bool, want ...string) {
		t.Helper()
		var got []string
		ips, h := d.clusterIPsHeard()
		for _, ip := range ips {
			got = append(got, ip.String())
		}
		if !slices.Equal(got, want) || h != heard {
			t.Errorf("%s: %q, heard %v, want %q, %v", what, got, h, want, heard)
		}
	}
	dns := func(texts ...string) *kube.DNSService {
		s := &kube.DNSService{}
		for _, text := range texts {
			s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr(text))
		}
		return s
	}
	gone := &kube.State{DNS: dns(), Missing: []kube.Name{{Namespace: "kube-system", Name: "kube-dns"}}}
	d.onCluster(gone)
	told("never there", false)
	t.Setenv("KUBE_DNS_SERVICE_HOST", "10.96.0.10")
	told("never there, with a variable", false, "10.96.0.10")
	for _, addrs := range [][]string{{"10.96.0.99", "fd00::99"}, {"10.96.0.7"}} {
		d.onCluster(&kube.State{DNS: dns(addrs...)})
		told("there", true, addrs...)
		d.onCluster(gone)
		told("deleted", true, addrs...)
		d.onCluster(gone)
		told("still deleted", true, addrs...)
		if _, warnings := d.conditions.get(); !slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, "no such Service: kube-system/kube-dns") }) {
			t.Errorf("warnings %q", warnings)
		}
	}
}

// TestNodeProblem: pods that are not this node's are told from its own.
func TestNodeProblem(t *testing.T) {
	machine := []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")}
	pods := func(texts ...string) map[netip.Addr]*search.List {
		m := map[netip.Addr]*search.List{}
		for _, text := range texts {
			m[netip.MustParseAddr(text)] = nil
		}
		return m
	}
	for name, tt := range map[string]struct {
		node string
		pods map[netip.Addr]*search.List
		own  []netip.Addr
		want string // a part; empty: no problem
	}{
		"no name":                   {"", nil, nil, "kubernetes.nodeName and $NODE_NAME are empty"},
		"no pod":                    {"nod-1", pods(), machine, `no pod is on node "nod-1"`},
		"another node's":            {"nod-1", pods("10.0.1.2", "192.0.2.8"), machine, "has an address of this machine"},
		"its own":                   {"nod-1", pods("10.0.1.2", "192.0.2.7"), machine, ""},
		"its own, by IPv6":          {"nod-1", pods("2001:db8::7"), machine, ""},
		"no address of the machine": {"nod-1", pods("10.0.1.2"), nil, ""},
	} {
		got := nodeProblem(tt.node, tt.pods, tt.own)
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// TestNodeProblemTold: it is logged once, shown as a metric, and so is its end.
func TestNodeProblemTold(t *testing.T) {
	var out lines
	d := &daemon{log: slog.New(slog.NewTextHandler(&out, nil)), conditions: newConditions(nil)}
	for range 3 {
		d.tellNode("wrong")
	}
	if n := strings.Count(out.String(), "level=WARN"); n != 1 || !strings.Contains(out.String(), "problem=wrong") || !d.nodeInDoubt.Load() {
		t.Errorf("%d lines, in doubt %v:\n%s", n, d.nodeInDoubt.Load(), &out)
	}
	for range 3 {
		d.tellNode("")
	}
	if n := strings.Count(out.String(), "level=INFO"); n != 1 || d.nodeInDoubt.Load() {
		t.Errorf("%d lines, in doubt %v:\n%s", n, d.nodeInDoubt.Load(), &out)
	}
}

// contractMetrics are the public names that exist so far.
func contractMetrics() []string {
	return strings.Fields(`build_info config_reloads_total config_hash_info socket_drops_total queries_total
		responses_total query_duration_seconds cache_hits_total cache_misses_total cache_entries cache_bytes
		cache_evictions_total prefetches_total shed_total upstream_queries_total upstream_failures_total
		upstream_duration_seconds upstream_hedges_total upstream_tcp_fallbacks_total
		upstream_budget_exhausted_total search_walks_total`)
}

// TestExplainAlone: without a daemon, the command looks up by itself.
func TestExplainAlone(t *testing.T) {
	up := startUpstream(t, "192.0.2.1")
	args := []string{"--control=/nonexistent/control.sock", fmt.Sprintf("--upstreams=[{zones: [.], servers: ['%v']}]", up)}
	code, out, err := dispatched(t, append([]string{"explain", "www.example.com"}, args...)...)
	if code != exitOK || !strings.Contains(out, "no daemon is running") || !strings.Contains(out, "192.0.2.1") {
		t.Errorf("code %d: %s\n%s", code, err, out)
	}
	// The DNS Service is as the cluster says. Nobody answers at its address here.
	for spec, want := range map[string]struct {
		code int
		text string
	}{
		"apiVersion: v1\nkind: Namespace\nmetadata: {name: kube-system}\n":                                                                                                               {exitWrong, "the cluster has no such Service"},
		"apiVersion: v1\nkind: Service\nmetadata: {name: kube-dns, namespace: kube-system}\nspec: {clusterIP: None, ports: [{port: 53, protocol: UDP}]}\n":                               {exitWrong, "it has no ClusterIP"},
		fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: kube-dns, namespace: kube-system}\nspec: {clusterIP: %v, ports: [{port: 53, protocol: UDP}]}\n", freeAddr().Addr()): {exitOK, "SERVFAIL"},
	} {
		code, out, err := dispatched(t, "explain", "www.example.com", "--control=/nonexistent/control.sock", "--kubernetes.source=file", "--kubernetes.file="+writeFile(t, "objects.yaml", spec))
		if code != want.code || !strings.Contains(out+err, want.text) {
			t.Errorf("%q: code %d, want %d and %q: %s\n%s", spec, code, want.code, want.text, err, out)
		}
	}
	for name, more := range map[string][]string{
		"no name":            {},
		"two clients":        {"a.example", "--client=10.0.0.1", "--namespace=shop"},
		"an address that is": {"a.example", "--client=pod"},
	} {
		if code, _, err := dispatched(t, append(append([]string{"explain"}, args...), more...)...); code != exitUsage || err == "" {
			t.Errorf("%s: code %d: %q", name, code, err)
		}
	}
}

// TestStartErrors: what keeps a daemon from starting is said with the remedy,
// and nothing stays open.
func TestStartErrors(t *testing.T) {
	up := startUpstream(t, "192.0.2.1")
	held, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	web, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	free := func() string { return freeAddr().String() }
	empty := writeFile(t, "resolv.conf", "search example.com\n# nameserver 192.0.2.1\n")
	tests := map[string]struct {
		args []string
		want []string
	}{
		"address not here":     {[]string{"--listen=192.0.2.77:5353"}, []string{"192.0.2.77:5353", "on no interface of this machine"}},
		"port in use":          {[]string{"--listen=" + held.LocalAddr().String()}, []string{held.LocalAddr().String(), "another process"}},
		"http port in use":     {[]string{"--listen=" + free(), "--http=" + web.Addr().String()}, []string{"http", "--http="}},
		"no nameservers":       {[]string{"--listen=" + free(), "--upstreams=[{zones: [.], servers: [" + empty + "]}]"}, []string{empty, "no nameservers"}},
		"no such resolv.conf":  {[]string{"--listen=" + free(), "--upstreams=[{zones: [.], servers: [/nonexistent]}]"}, []string{"/nonexistent"}},
		"forwards to itself":   {[]string{"--listen=127.0.0.1:5399", "--upstreams=[{zones: [.], servers: ['127.0.0.1:5399']}]"}, []string{"127.0.0.1:5399"}},
		"unspecified, to self": {[]string{"--listen=0.0.0.0:5399", "--upstreams=[{zones: [.], servers: ['127.0.0.1:5399']}]"}, []string{"127.0.0.1:5399", "loop"}},
		"no service account":   {[]string{"--listen=" + free(), "--kubernetes.source=api", "--guard.enabled=false"}, []string{"kubernetes", "service account"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			args := []string{"run", "--control=" + filepath.Join(t.TempDir(), "control.sock"), "--http="}
			if !strings.Contains(strings.Join(tt.args, " "), "--upstreams") {
				args = append(args, fmt.Sprintf("--upstreams=[{zones: [.], servers: ['%v']}]", up))
			}
			var log lines
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			code := dispatch(ctx, &cli{out: io.Discard, err: &log}, append(args, tt.args...))
			if code != exitWrong {
				t.Fatalf("code %d:\n%s", code, log.String())
			}
			for _, w := range tt.want {
				if !strings.Contains(log.String(), w) {
					t.Errorf("no %q in:\n%s", w, log.String())
				}
			}
		})
	}
}

// TestHTTPShared: processes that overlap have the pages' address together, others
// do not.
func TestHTTPShared(t *testing.T) {
	addr := freeAddr().String()
	for _, share := range []bool{true, true, false} {
		l, err := listenHTTP(t.Context(), addr, share)
		if (err == nil) != share {
			t.Fatalf("share %v: %v", share, err)
		}
		if l != nil {
			t.Cleanup(func() { _ = l.Close() })
		}
	}
}

// TestControlSocketTaken: a second daemon answers queries all the same.
func TestControlSocketTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "control.sock")
	first, err := listenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listenControl(t.Context(), path); err == nil {
		t.Error("taken from a living process")
	}
	// A dead process leaves the file behind.
	first.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := listenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	_ = again.Close()
	file := writeFile(t, "plain", "")
	if _, err := listenControl(t.Context(), file); err == nil {
		t.Error("replaced a file that is no socket")
	}
}
