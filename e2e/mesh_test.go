package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// meshClient is a running testdata/mesh.c.
type meshClient struct {
	t       *testing.T
	process *lab.Process
	out     *kubelab.Log
	early   int // failures before the incident
}

var meshProgram struct {
	once sync.Once
	path string
	err  error
}

// compileMesh compiles the client, once.
func compileMesh(t *testing.T) string {
	t.Helper()
	p := &meshProgram
	p.once.Do(func() {
		p.path = filepath.Join("..", ".cache", "e2e", "mesh")
		if p.path, p.err = filepath.Abs(p.path); p.err != nil {
			return
		}
		out, err := exec.CommandContext(t.Context(), "cc", "-O1", "-Wall", "-Wextra", "-o", p.path, "testdata/mesh.c", "-lcares").CombinedOutput()
		if err != nil {
			p.err = fmt.Errorf("compile testdata/mesh.c (Debian packages gcc, libc6-dev, libc-ares-dev): %w\n%s", err, out)
		}
	})
	if p.err != nil {
		labtest.Missing(t, p.err)
	}
	return p.path
}

// How the client asks: names at once, each again after the interval; c-ares asks
// three times and waits twice as long each time, 4.2 s in all.
const (
	meshNames    = 1000
	meshServices = 100 // of them; the API server takes 10 ms for each
	meshInterval = time.Second
	meshTimeout  = 600 * time.Millisecond
	meshTries    = 3
)

// startMesh starts the client in a pod.
func startMesh(t *testing.T, pod *kubelab.Pod, server netip.AddrPort, names []string) *meshClient {
	t.Helper()
	m := &meshClient{t: t, out: new(kubelab.Log)}
	script := fmt.Sprintf("exec %s %v %d %d %d </run/names", compileMesh(t), server.Addr(), meshInterval.Milliseconds(), meshTimeout.Milliseconds(), meshTries)
	var err error
	m.process, err = pod.Start(lab.Command{
		Path: "/bin/sh", Args: []string{"-c", script}, Stdout: m.out, Stderr: os.Stderr,
		Files: map[string][]byte{"names": []byte(strings.Join(names, "\n") + "\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// round returns how often every name has had an outcome.
func (m *meshClient) round() int {
	n := 0
	for line := range strings.Lines(m.out.String()) {
		fmt.Sscanf(line, "round %d", &n)
	}
	return n
}

// failed returns how many resolutions have failed so far.
func (m *meshClient) failed() int { return strings.Count(m.out.String(), "fail ") }

// sockets returns the ports of the client's UDP sockets so far.
func (m *meshClient) sockets() []uint16 {
	var ports []uint16
	for line := range strings.Lines(m.out.String()) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "socket" && f[1] == "udp" {
			port, err := strconv.ParseUint(f[2], 10, 16)
			if err != nil {
				m.t.Fatal(err)
			}
			ports = append(ports, uint16(port))
		}
	}
	return ports
}

// brief is what the client printed, without most of the failures.
func (m *meshClient) brief() string {
	const shown = 20
	var b strings.Builder
	fails := 0
	for line := range strings.Lines(m.out.String()) {
		if strings.HasPrefix(line, "fail") {
			if fails++; fails > shown {
				continue
			}
		}
		b.WriteString(line)
	}
	return b.String()
}

// meshResult is what the client tells at its end.
type meshResult struct {
	resolutions, failed int
	early               int // of the failed: before the incident
	worst               time.Duration
	said                string // the client, in brief
}

// stop ends the client.
func (m *meshClient) stop() meshResult {
	m.t.Helper()
	if err := m.process.Signal(syscall.SIGTERM); err != nil {
		m.t.Fatalf("mesh client: %v\n%s", err, m.out.Tail(20))
	}
	<-m.process.Done()
	r := meshResult{early: m.early, said: m.brief()}
	var worst int
	for line := range strings.Lines(m.out.String()) {
		fmt.Sscanf(line, "done %d %d %d", &r.resolutions, &r.failed, &worst)
	}
	r.worst = time.Duration(worst) * time.Millisecond
	if r.resolutions == 0 {
		m.t.Fatalf("the mesh client told nothing: %v\n%s", m.process.Err(), m.out.Tail(20))
	}
	return r
}

// services makes Services without endpoints in the namespace default, until the
// test's end, and returns the names that a mesh asks: theirs, and pods' to make up
// the number.
func (w *world) services(count int) (names []string) {
	w.t.Helper()
	const workers = 16
	ctx := w.soon()
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), eventually)
		defer cancel()
		var all sync.WaitGroup
		for worker := range workers {
			all.Go(func() {
				for i := worker; i < count; i += workers {
					if err := w.Core.Services("default").Delete(ctx, meshService(i), metav1.DeleteOptions{}); err != nil {
						w.t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	})
	w.each(workers, func(worker int) error {
		for i := worker; i < count; i += workers {
			_, err := w.Core.Services("default").Create(ctx, &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: meshService(i)},
				Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
		}
		return nil
	})
	for i := range count {
		names = append(names, meshService(i)+".default.svc.cluster.local.")
	}
	for i := range meshNames - count {
		names = append(names, fmt.Sprintf("10-1-%d-%d.default.pod.cluster.local.", i/250, i%250))
	}
	// CoreDNS hears of them a moment later.
	for _, d := range w.dns {
		w.await("the last Service in "+d.Name, func(context.Context) error {
			_, err := w.ask(w.client.Namespace, "udp", netip.AddrPortFrom(d.IP4, 53), meshService(count-1)+".default.svc.cluster.local.", 1)
			return err
		})
	}
	return names
}

func meshService(i int) string { return fmt.Sprintf("mesh-%d", i) }

// kubeletNotices is how long after a process's death the node reports its pod
// unready: kubelet's readiness probe takes up to 30 s, a lost node 40 s.
const kubeletNotices = 6 * time.Second

// TestMesh: c-ares clients with one UDP port each resolve 1,000 names at once and
// each again after a second, while a CoreDNS dies without a word, its pod is deleted as
// an eviction does it, and the node reports it unready 6 s later. Without dnsguard,
// healthy kube-proxy and all, a client whose flow leads there resolves nothing until
// then; on a node with dnsguard none of the names fails, whether it answers or only
// guards. The client without dnsguard and the one whose node answers see the same
// death.
func TestMesh(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	names := w.services(meshServices)
	other := side{w.nodes[1], w.addPod(w.nodes[1], "client-b")}

	// begin starts a client, and waits until it has had two rounds.
	begin := func(w *world, s side) *meshClient {
		m := startMesh(w.t, s.pod, kubelab.DNS4, names)
		w.rounds(m, 2)
		m.early = m.failed()
		return m
	}
	die := func(w *world, died *kubelab.Pod, clients ...*meshClient) []meshResult {
		w.must(died.Die())
		w.must(died.Delete(w.soon(), 30))
		<-time.After(kubeletNotices) // the schedule of the outage, not a wait
		w.must(died.Report(w.soon(), false))
		w.must(died.Delete(w.soon(), 0))
		for _, m := range clients {
			w.rounds(m, 3)
		}
		results := make([]meshResult, len(clients))
		for i, m := range clients {
			results[i] = m.stop()
			if n := len(m.sockets()); n != 1 {
				w.t.Errorf("a client used %d UDP sockets, not one for ever", n)
			}
		}
		return results
	}

	t.Run("without dnsguard and with it", func(t *testing.T) {
		w := w.in(t)
		overflows := w.overflows()
		g := w.guard(w.nodes[0])
		w.awaitMet(w.nodes[0])
		with := begin(w, side{w.nodes[0], w.client})
		without := begin(w, other)
		results := die(w, w.pinnedTo(other, without), without, with)
		overflows = w.overflows() - overflows
		r := results[0]
		t.Logf("without dnsguard: %d of %d resolutions failed, %d of them in the first burst; CoreDNS's socket overflowed %d times", r.failed, r.resolutions, r.early, overflows)
		if r.failed-r.early < meshNames/2 {
			t.Errorf("only %d resolutions failed: no outage:\n%s", r.failed-r.early, r.said)
		}
		r = results[1]
		hits, err := g.Metric(w.soon(), "dnsguard_cache_hits_total", `kind="positive"`)
		w.must(err)
		t.Logf("with dnsguard: %d of %d resolutions failed, %d of them in the first burst; the slowest took %v; %v answers from the cache", r.failed, r.resolutions, r.early, r.worst, hits)
		if r.failed > 0 {
			t.Errorf("%d resolutions failed, %d of them before the death; %s\n%s", r.failed, r.early, w.figures(g), r.said)
		}
		w.leave(g)
	})
	w.restore()
	t.Run("with the guard alone", func(t *testing.T) {
		w := w.in(t)
		overflows := w.overflows()
		g := w.guard(w.nodes[0], kubelab.GuardOnly()...)
		w.awaitMet(w.nodes[0])
		s := side{w.nodes[0], w.client}
		m := begin(w, s)
		r := die(w, w.pinnedTo(s, m), m)[0]
		t.Logf("with the guard alone: %d of %d resolutions failed, %d of them in the first burst; the slowest took %v; CoreDNS's socket overflowed %d times", r.failed, r.resolutions, r.early, r.worst, w.overflows()-overflows)
		// c-ares asks again, and is heard. The first burst may be more than CoreDNS's
		// socket holds.
		if r.failed > r.early {
			t.Errorf("%d resolutions failed after the death:\n%s", r.failed-r.early, r.said)
		}
		w.leave(g)
	})
}

// rounds waits until every name has had so many outcomes more.
func (w *world) rounds(m *meshClient, more int) {
	w.t.Helper()
	want := m.round() + more
	w.await(fmt.Sprintf("%d more rounds of the mesh client", more), func(context.Context) error {
		if got := m.round(); got < want {
			return fmt.Errorf("%d of %d", got, want)
		}
		return nil
	})
}

// overflows counts the questions for which CoreDNS's sockets had no room.
func (w *world) overflows() int {
	w.t.Helper()
	sum := 0
	for _, d := range w.dns {
		n, err := udpCounter(d.Namespace, "RcvbufErrors")
		w.must(err)
		sum += n
	}
	return sum
}

// pinnedTo returns the CoreDNS that the only flow of a client leads to.
func (w *world) pinnedTo(s side, m *meshClient) *kubelab.Pod {
	w.t.Helper()
	return w.leads(s.node, netip.AddrPortFrom(s.pod.IP4, m.sockets()[0]), kubelab.DNS4)
}
