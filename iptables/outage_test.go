package iptables

import (
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// variant is a way to intercept.
type variant struct {
	name    string
	backend Backend
	path    string // PATH of the agent
}

// variants returns every backend; iptables in both of its variants, as the
// programs are called on nodes that use the one or the other.
func variants(t *testing.T) []variant {
	t.Helper()
	out := []variant{{name: "nftables", backend: NFTables}}
	for _, v := range []string{"nft", "legacy"} {
		multi := need(t, "xtables-"+v+"-multi")
		dir := t.TempDir()
		for _, name := range []string{"iptables-restore", "iptables-save", "ip6tables-restore", "ip6tables-save"} {
			if err := os.Symlink(multi, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		out = append(out, variant{name: "iptables-" + v, backend: IPTables, path: dir})
	}
	return out
}

// traffic is one stream of queries.
type traffic struct {
	name   string
	ns     *lab.Namespace
	load   lab.Load
	result *lab.LoadResult
}

// streams are the kinds of clients: each transport, family, kind of port and
// path. ratePerSecond is that of each.
func (s *scene) streams(v variant, rate int, length time.Duration) []*traffic {
	load := func(server netip.AddrPort, tcp bool, sockets int) lab.Load {
		return lab.Load{
			Server: server, TCP: tcp, Rate: rate, Queries: int(float64(rate) * length.Seconds()), Sockets: sockets,
			Names: []string{"www.example.com"}, Timeout: slack * time.Second,
		}
	}
	pod := s.pod.Namespace
	out := []*traffic{
		{name: "udp4, fixed ports", ns: pod, load: load(vip4, false, 4)},
		{name: "udp4, new ports", ns: pod, load: load(vip4, false, 0)},
		{name: "udp6, fixed ports", ns: pod, load: load(vip6, false, 4)},
		{name: "tcp4, new connections", ns: pod, load: load(vip4, true, 0)},
		{name: "tcp6, new connections", ns: pod, load: load(vip6, true, 0)},
	}
	if v.backend == NFTables {
		node := s.Node.Namespace
		out = append(out,
			&traffic{name: "udp4, host client", ns: node, load: load(vip4, false, 4)},
			&traffic{name: "tcp6, host client", ns: node, load: load(vip6, true, 0)},
			&traffic{name: "udp4, link-local", ns: pod, load: load(link4, false, 4)},
			&traffic{name: "udp6, link-local, host client", ns: node, load: load(link6, false, 0)},
			&traffic{name: "tcp4, link-local", ns: pod, load: load(link4, true, 0)},
		)
	}
	return out
}

// run drives all streams at once; the returned function waits for their end.
func run(t *testing.T, streams []*traffic) (wait func()) {
	t.Helper()
	var wg sync.WaitGroup
	for _, s := range streams {
		wg.Go(func() {
			r, err := s.load.Run(t.Context(), s.ns)
			if err != nil {
				t.Errorf("%s: %v", s.name, err)
			}
			s.result = r
		})
	}
	return func() {
		wg.Wait()
		for _, s := range streams {
			t.Logf("%-30s %v", s.name, s.result)
		}
	}
}

// takeClusterIPs starts an agent that takes the ClusterIPs of both families, and waits
// until it does.
func (v variant) takeClusterIPs(t *testing.T, ns *lab.Namespace) (*agent, Config) {
	t.Helper()
	cfg := clusterIPConfig()
	cfg.Backend = v.backend
	a := startAgent(t, ns, agentConfig{Config: cfg, Path: v.path})
	a.awaitTaking(4)
	return a, cfg
}

// config is what the variant can intercept.
func (v variant) config() Config {
	c := clusterIPConfig()
	if v.backend == NFTables {
		c.Addresses = append(c.Addresses, link4, link6)
	}
	c.Backend = v.backend
	return c
}

// TestKillUnderLoad kills the process as the OOM killer would, and starts
// another: what is lost was in its hands.
func TestKillUnderLoad(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			cfg := agentConfig{Config: v.config(), Sockets: 2, Path: v.path}
			services := 2 * len(cfg.Config.Addresses)
			a := startAgent(t, s.Node.Namespace, cfg)
			a.awaitTaking(services)
			const length, rate = 3 * time.Second, 200 / slack
			streams := s.streams(v, rate, length)
			before := upstream(s)
			wait := run(t, streams)

			<-time.After(length / 3)
			if n := upstream(s) - before; n > 0 {
				t.Errorf("kube-proxy's endpoints were asked %d times while we were there", n)
			}
			a.kill()
			<-time.After(length / 3)
			if n := upstream(s) - before; n == 0 {
				t.Error("kube-proxy's endpoints were not asked after our death")
			}
			b := startAgent(t, s.Node.Namespace, cfg)
			b.awaitTaking(services)
			wait()
			for _, st := range streams {
				// Those in the dying process's queues: on an idle machine 0 to 3,
				// on a busy one as many as it was behind, a tenth of a second.
				if n := st.result.Failed(); n > slack*rate/10 {
					t.Errorf("%s: %d queries lost", st.name, n)
				}
			}
		})
	}
}

func upstream(s *scene) int {
	n := 0
	for _, d := range s.dns {
		udp, tcp := d.Server.Total()
		n += udp + tcp
	}
	return n
}

// TestHang stops the process: after AliveTimeout kube-proxy answers, until it
// goes on.
func TestHang(t *testing.T) {
	for _, v := range variants(t) {
		t.Run(v.name, func(t *testing.T) {
			s := newScene(t)
			cfg := agentConfig{Config: v.config(), Sockets: 2, Path: v.path}
			services := 2 * len(cfg.Config.Addresses)
			a := startAgent(t, s.Node.Namespace, cfg)
			a.awaitTaking(services)
			const length, rate = 4 * time.Second, 100 / slack
			streams := s.streams(v, rate, length)
			for _, st := range streams {
				st.load.Timeout = time.Second // shorter than the hang
			}
			wait := run(t, streams)
			<-time.After(length / 4)
			a.signal(syscall.SIGSTOP)
			<-time.After(length / 2)
			a.signal(syscall.SIGCONT)
			a.awaitTaking(2 * services)
			wait()
			if n := a.stats().Withdrawals[ReasonSilent]; n < uint64(services) {
				t.Errorf("%d withdrawals were counted, want %d", n, services)
			}
			for _, st := range streams {
				from, outage := st.result.LongestOutage()
				// AliveTimeout, and what a busy machine adds. (xt_recent counts
				// whole seconds, by its own clock.)
				if limit := time.Second + slack*500*time.Millisecond; outage > limit {
					t.Errorf("%s: no answer for %v from %v on, want at most %v", st.name, outage, from, limit)
				}
				if outage < 300*time.Millisecond {
					t.Errorf("%s: no answer for %v only: was the process not taking this?", st.name, outage)
				}
			}
		})
	}
}

// TestTrackedFlowsAreTakenOver starts in the middle of flows that conntrack
// knows: a client with a fixed port is ours from the next packet on.
func TestTrackedFlowsAreTakenOver(t *testing.T) {
	s := newScene(t)
	const length = 3 * time.Second
	v := variant{backend: NFTables}
	streams := s.streams(v, 200/slack, length)[:3]
	wait := run(t, streams)
	<-time.After(length / 3)
	flows, err := s.Node.Flows()
	if err != nil || len(flows) == 0 {
		t.Fatalf("no flow is tracked before we start: %v, %v", flows, err)
	}
	a := startAgent(t, s.Node.Namespace, agentConfig{Config: v.config(), Sockets: 2})
	a.awaitTaking(8)
	before := upstream(s)
	wait()
	if n := upstream(s) - before; n > 2 {
		t.Errorf("kube-proxy's endpoints were asked %d times after we had started", n)
	}
	for _, st := range streams {
		if n := st.result.Failed(); n > 0 {
			t.Errorf("%s: %d queries lost", st.name, n)
		}
	}
}
