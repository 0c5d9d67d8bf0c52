package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// kernelShare is what GOMEMLIMIT leaves of the limit to the kernel, for sockets
// mostly, which has no aim and needs as much with any limit.
const kernelShare = 48 << 20

// watermark follows a memory group.
type watermark struct {
	mu           sync.Mutex
	all, sockets int64 // the most at one time
	fixed        int64 // without files' pages
	wg           sync.WaitGroup
	stop         context.CancelFunc
}

func watch(t *testing.T, g *labtest.MemoryGroup) *watermark {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	w := &watermark{stop: stop}
	w.wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			all, sockets, err := g.Usage()
			fixed, ferr := g.Unreclaimable()
			if err != nil || ferr != nil {
				t.Errorf("memory of the group: %v, %v", err, ferr)
				return
			}
			w.mu.Lock()
			w.all, w.sockets, w.fixed = max(w.all, all), max(w.sockets, sockets), max(w.fixed, fixed)
			w.mu.Unlock()
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	return w
}

func (w *watermark) end() { w.stop(); w.wg.Wait() }

func (w *watermark) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("at most %.1f MiB, %.1f without files' pages, of it %.1f of sockets", mib(w.all), mib(w.fixed), mib(w.sockets))
}

func mib(octets int64) float64 { return float64(octets) / (1 << 20) }

// flood is everything at once: names that nobody answers from many clients,
// random names with full and with huge answers, TCP clients that ask for huge
// answers and read nothing, readers of pages that do not read, and datagrams that
// are no queries, as fast as they can be sent.
func (n *node) flood(length time.Duration, http netip.AddrPort) (wait func()) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), length)
	var wg sync.WaitGroup
	load := func(pod *lab.Pod, name string, rate int, tcp bool) {
		wg.Go(func() {
			r, err := lab.Load{
				Server: clusterIP4, TCP: tcp, Rate: rate, Queries: rate * int(length.Seconds()), Sockets: 8,
				Names: []string{name + "." + hostileZone}, Type: dns.TypeTXT, Unique: true, Timeout: 2 * time.Second,
			}.Run(n.t.Context(), pod.Namespace)
			if err != nil {
				n.t.Error(err)
			}
			n.t.Logf("%-8s %v", name, r)
		})
	}
	for i := range 3 {
		load(labtest.AddPod(n.t, n.Lab, "silent-"+strconv.Itoa(i)), "silent", 2000, false)
	}
	load(labtest.AddPod(n.t, n.Lab, "big"), "big", 3000, false)
	load(labtest.AddPod(n.t, n.Lab, "huge"), "huge", 1500, false)
	hoarders := labtest.AddPod(n.t, n.Lab, "hoarders")
	from := n.manyAddresses(hoarders)
	hot := pipeline(n.t, "0.huge."+hostileZone, dns.TypeTXT, 300)
	for range 1500 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := dialFrom(ctx, hoarders, from(), clusterIP4)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(3 * time.Second))
					_, _ = c.Write(hot)
				}
				select {
				case <-ctx.Done():
				case <-time.After(3 * time.Second):
				}
				if err == nil {
					_ = c.Close()
				}
			}
		})
	}
	for range 300 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := dialFrom(ctx, hoarders, from(), http)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(2 * time.Second))
					_, _ = c.Write(bytes.Repeat([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), 10_000))
				}
				select {
				case <-ctx.Done():
				case <-time.After(2 * time.Second):
				}
				if err == nil {
					_ = c.Close()
				}
			}
		})
	}
	junk := labtest.AddPod(n.t, n.Lab, "junk")
	for _, server := range n.servers() {
		if server.Addr() != clusterIP4.Addr() && server.Addr() != clusterIP6.Addr() {
			continue
		}
		wg.Go(func() {
			c, err := junk.Dial(ctx, "udp", server.String())
			if err != nil {
				n.t.Error(err)
				return
			}
			defer c.Close()
			msg := bytes.Repeat([]byte{0xff}, 1400)
			for i := uint32(0); ctx.Err() == nil; i++ {
				binary.BigEndian.PutUint32(msg, i)
				_, _ = c.Write(msg)
			}
		})
	}
	return func() {
		wg.Wait()
		cancel()
	}
}

// TestNodeMemoryLimit: within the memory limits that docs/OPERATIONS.md goes with
// the settings, no flood has the process killed, and what is known is answered
// afterwards; nor with as many readers as a configuration may ask for.
func TestNodeMemoryLimit(t *testing.T) {
	labtest.RequireSpeed(t)
	for _, tt := range []struct {
		name     string
		limit    int64 // of memory, octets
		settings []string
		readers  int // 0: as many as it finds right
		length   time.Duration
	}{
		{"as deployed", 192 << 20, []string{"cache: {size: 32Mi}"}, 0, 8 * time.Second},
		{"128 MiB", 128 << 20, []string{"cache: {size: 16Mi}", "limits: {inFlight: 2000}"}, 0, 8 * time.Second},
		{"64 readers", 128 << 20, []string{"cache: {size: 16Mi}", "limits: {inFlight: 2000, readers: 64}"}, 64, 5 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) { memoryUnderFlood(t, tt.limit, tt.settings, tt.readers, tt.length) })
	}
}

func memoryUnderFlood(t *testing.T, limit int64, settings []string, readers int, length time.Duration) {
	group := labtest.NewMemoryGroup(t, limit)
	n := newNode(t)
	h := n.addHostile()
	t.Setenv("GOMEMLIMIT", strconv.FormatInt(limit-kernelShare, 10))
	n.exe = built(t)
	var d *guardd
	confinement{Exe: n.exe, Procs: group.Procs()}.on(t, n, func() {
		d = n.launch("a", append(settings, "listen: []", `http: ":9253"`, "log: {level: info, format: json}", h.upstreams())...)
	})
	defer d.stop()
	d.awaitReady()
	if readers > 0 {
		d.awaitLog(`"msg":"serving"`, fmt.Sprintf(`"readers":%d`, readers))
	}
	if err := n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName); err != nil {
		t.Fatal(err)
	}
	if all, _, err := group.Usage(); err != nil || all < 1<<20 {
		t.Fatalf("%d octets are charged to the group, %v: the process is not in it", all, err)
	}
	marks := watch(t, group)
	n.flood(length, netip.AddrPortFrom(n.Node.IP4, 9253))()
	marks.end()
	t.Log(marks)
	kills, err := group.Kills()
	if err != nil || kills > 0 {
		t.Fatalf("%d processes were killed, %v", kills, err)
	}
	if marks.fixed > limit {
		t.Errorf("%.1f MiB were needed", mib(marks.fixed))
	}
	if n := strings.Count(d.log.String(), "\n"); n > 500 {
		t.Errorf("%d lines of log: clients write them", n)
	}
	if line := d.logged("stand still"); line != "" {
		t.Errorf("a reader that works was taken for one that does not: %s", line)
	}
	await(t, "what is known to be answered", func() bool { return n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName) == nil })
	if page := d.page("/metrics"); len(page) > pageBuffer {
		t.Errorf("/metrics has %d octets, more than are written to a client that does not read", len(page))
	}
	if shed := d.metric("dnsguard_shed_total"); shed < 500 || h.asked.Load() < 500 {
		t.Errorf("%v shed, and %d questions asked: it was no flood", shed, h.asked.Load())
	}
	t.Logf("the hostile upstream was asked %d times; %v shed, %v entries evicted", h.asked.Load(), d.metric("dnsguard_shed_total"), d.metric("dnsguard_cache_evictions_total"))
}

// TestNodeOutOfMemory: under load the kernel kills a daemon whose limit is far too
// small. What was in its hands is lost, and kube-proxy's path serves.
func TestNodeOutOfMemory(t *testing.T) {
	labtest.RequireSpeed(t)
	group := labtest.NewMemoryGroup(t, 40<<20)
	n := newNode(t)
	h := n.addHostile()
	n.exe = built(t)
	var d *guardd
	confinement{Exe: n.exe, Procs: group.Procs()}.on(t, n, func() { d = n.launch("a", "cache: {size: 256Mi}", h.upstreams()) })
	d.awaitReady()
	start := time.Now()
	streams := n.streams(nodeVariants()[0], outageUDP/2, outageTCP/2, 10*time.Second)
	wait := drive(t, streams)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var growth sync.WaitGroup
	growth.Go(func() { // random names, until it has died of them
		big := labtest.AddPod(t, n.Lab, "big")
		_, err := lab.Load{
			Server: clusterIP4, TCP: true, Rate: 2500, Queries: 30_000, Sockets: 16,
			Names: []string{"big." + hostileZone}, Type: dns.TypeTXT, Unique: true, Timeout: time.Second,
		}.Run(ctx, big.Namespace)
		if err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	select {
	case <-d.proc.Done():
	case <-time.After(time.Until(start.Add(9 * time.Second))):
		t.Error("it is not killed, and this proves nothing")
	}
	died := time.Now()
	stop()
	growth.Wait()
	if kills, err := group.Kills(); err != nil || kills != 1 {
		t.Errorf("%d processes were killed for want of memory, %v", kills, err)
	}
	await(t, "answers on kube-proxy's path", func() bool { return n.ask(n.pod.Namespace, "udp", clusterIP4, cachedName) == nil })
	t.Logf("killed %v after the start; the first answer after that took %v", died.Sub(start), time.Since(died))
	// The kernel looks for memory before it kills, and the process stands still
	// meanwhile: then it hangs, for no longer than aliveTimeout.
	wait()
	for _, s := range streams {
		if from, length := s.result.LongestOutage(); length > 1300*time.Millisecond {
			t.Errorf("%s: no answer for %v from %v", s.name, length, from)
		}
	}
	for _, server := range n.servers() {
		if err := n.ask(n.pod.Namespace, "udp", server, cachedName); err != nil {
			t.Error(err)
		}
	}
}
