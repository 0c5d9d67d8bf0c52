package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/bench/internal/proc"
	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/miekg/dns"
)

// CPUs of the two sides; taskset holds each process to its own.
const (
	serverCPU = "0"
	clientCPU = "1"
)

// Sizes of the trials.
const (
	hitNames  = 1000
	window    = 100
	fewNames  = 10_000
	manyNames = 100_000
)

// pattern makes queries of 51 bytes and answers of 67.
const pattern = "host-########.names.bench.example"

// readyTimeout bounds a server's start.
const readyTimeout = 30 * time.Second

// bench runs one server at a time.
type bench struct {
	network  *network
	tools    string // directory of load and echo
	duration time.Duration
	upstream *lab.Process
}

// sample is one round of one server: metric to value.
type sample map[metric]float64

// load is what we read of the generator's report.
type load struct {
	Sent       uint64            `json:"sent"`
	Answered   uint64            `json:"answered"`
	Lost       uint64            `json:"lost"`
	Mismatched uint64            `json:"mismatched"`
	Rcodes     map[string]uint64 `json:"rcodes"`
	QPS        float64           `json:"qps"`
	Latency    struct {
		P50  float64 `json:"p50"`
		P99  float64 `json:"p99"`
		P999 float64 `json:"p999"`
	} `json:"latency_us"`
	CPU struct {
		Both float64 `json:"us_per_query"`
	} `json:"server_cpu"`
}

func (b *bench) startUpstream(ctx context.Context) (err error) {
	b.upstream, err = b.network.client.Start(lab.Command{
		Path: "taskset",
		Args: []string{"-c", clientCPU, filepath.Join(b.tools, "echo"), "-answer", "-listen", clientAddr + ":53"},
		// What it says goes where the server's words go: to whoever watches.
		Stderr: os.Stderr,
	})
	if err != nil {
		return err
	}
	return b.awaitAnswer(ctx, b.upstream, clientAddr)
}

// round measures everything once, each trial on a server that has just started.
func (b *bench) round(ctx context.Context, s installed) (sample, error) {
	m := sample{binarySize: float64(s.size)}
	err := b.with(ctx, s, func(p *lab.Process, took time.Duration) error {
		m[startup] = float64(took) / float64(time.Millisecond)
		return b.rates(ctx, s, p, m)
	})
	if err != nil || s.limit {
		return m, err
	}
	err = b.with(ctx, s, func(p *lab.Process, _ time.Duration) error { return b.memory(ctx, s, p, m) })
	return m, err
}

// rates measures hits, then misses.
func (b *bench) rates(ctx context.Context, s installed, p *lab.Process, m sample) error {
	if err := b.fill(ctx, hitNames); err != nil {
		return err
	}
	hits := []string{"-n", strconv.Itoa(hitNames), "-pid", strconv.Itoa(p.Pid())}
	before, err := proc.CPU(b.upstream.Pid())
	if err != nil {
		return err
	}
	saturated, err := b.load(ctx, append(hits, "-window", strconv.Itoa(window))...)
	if err != nil {
		return fmt.Errorf("hits at saturation: %w", err)
	}
	after, err := proc.CPU(b.upstream.Pid())
	if err != nil {
		return err
	}
	// CPU time comes in steps of 10 ms.
	if asked := after.Sub(before).Total(); asked > max(b.duration/50, 50*time.Millisecond) {
		return fmt.Errorf("hits at saturation: not hits: the upstream worked for %v", asked)
	}
	m[hitQPS], m[hitCPU] = saturated.QPS, saturated.CPU.Both
	m[lost] = float64(saturated.Lost + saturated.Mismatched)

	for _, at := range []struct {
		rate                string
		cpu, p50, p99, p999 metric
	}{
		{"1000", cpu1k, p50At1k, p99At1k, p999At1k},
		{"5000", cpu5k, p50At5k, p99At5k, p999At5k},
	} {
		l, err := b.load(ctx, append(hits, "-rate", at.rate, "-busy")...)
		if err != nil {
			return fmt.Errorf("hits at %s/s: %w", at.rate, err)
		}
		m[at.cpu], m[at.p50], m[at.p99], m[at.p999] = l.CPU.Both, l.Latency.P50, l.Latency.P99, l.Latency.P999
		m[lost] += float64(l.Lost + l.Mismatched)
	}
	if s.limit {
		return nil
	}
	misses, err := b.load(ctx, "-n", "0", "-first", strconv.Itoa(manyNames), "-window", strconv.Itoa(window),
		"-pid", strconv.Itoa(p.Pid()))
	if err != nil {
		return fmt.Errorf("misses: %w", err)
	}
	m[missQPS], m[missCPU] = misses.QPS, misses.CPU.Both
	m[missLost] = float64(misses.Lost + misses.Mismatched)
	return nil
}

// memory measures what an entry costs: the growth from few names to many.
func (b *bench) memory(ctx context.Context, s installed, p *lab.Process, m sample) error {
	var err error
	if m[rssEmpty], err = resident(p); err != nil {
		return err
	}
	sizes := []struct {
		names int
		rss   metric
	}{{fewNames, rssFew}, {manyNames, rssMany}}
	for _, size := range sizes {
		if err := b.fill(ctx, size.names); err != nil {
			return err
		}
		if m[size.rss], err = resident(p); err != nil {
			return err
		}
	}
	if s.preallocates {
		return nil
	}
	m[bytesPerEntry] = (m[rssMany] - m[rssFew]) / (manyNames - fewNames)
	return nil
}

// with starts a server, waits for its first answer, and ends it after f.
func (b *bench) with(ctx context.Context, s installed, f func(p *lab.Process, took time.Duration) error) (err error) {
	var output bytes.Buffer
	files := map[string][]byte{}
	for name, text := range s.files {
		files[strings.TrimPrefix(filepath.Join(runDir, name), "/run/")] = []byte(text)
	}
	begin := time.Now()
	p, err := b.network.server.Start(lab.Command{
		Path:   "taskset",
		Args:   append([]string{"-c", serverCPU, s.path}, s.args...),
		Stdout: &output,
		Stderr: &output,
		Files:  files,
	})
	if err != nil {
		return err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = p.Stop(stopping) // how it ends is not what is measured
		if err != nil {
			err = fmt.Errorf("%w; %s said: %s", err, s.name, bytes.TrimSpace(output.Bytes()))
		}
	}()
	if err := b.awaitAnswer(ctx, p, serverAddr); err != nil {
		return err
	}
	return f(p, time.Since(begin))
}

// awaitAnswer asks until the process p answers at addr.
func (b *bench) awaitAnswer(ctx context.Context, p *lab.Process, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	conn, err := b.network.client.Dial(ctx, "udp", addr+":53")
	if err != nil {
		return fmt.Errorf("dial %s: %w", addr, err)
	}
	defer func() { _ = conn.Close() }()
	query := new(dns.Msg).SetQuestion("ready.bench.example.", dns.TypeA)
	packed, err := query.Pack()
	if err != nil {
		return fmt.Errorf("pack the first question: %w", err)
	}
	buf := make([]byte, 1232)
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the first answer: %w", ctx.Err())
		case <-p.Done():
			return errors.Join(errors.New("server ended before its first answer"), p.Err())
		default:
		}
		// Until it listens the kernel refuses; that costs no time worth waiting.
		if _, err := conn.Write(packed); err == nil {
			if err := conn.SetReadDeadline(time.Now().Add(2 * time.Millisecond)); err != nil {
				return fmt.Errorf("wait for the first answer: %w", err)
			}
			n, err := conn.Read(buf)
			// The echo's answer has no answer section; a server's SERVFAIL, while
			// it does not yet trust its upstream, is not an answer.
			if err == nil && n >= 12 && buf[0] == packed[0] && buf[1] == packed[1] && buf[3]&0x0f == 0 {
				return nil
			}
		}
		time.Sleep(500 * time.Microsecond)
	}
}

// resident is a server's memory as a figure.
func resident(p *lab.Process) (float64, error) {
	bytes, err := proc.RSS(p.Pid())
	return float64(bytes), err
}

// fill has the first n names cached.
func (b *bench) fill(ctx context.Context, n int) error {
	l, err := b.load(ctx, "-once", "-n", strconv.Itoa(n), "-window", "20", "-timeout", "5s")
	if err != nil {
		return fmt.Errorf("fill with %d names: %w", n, err)
	}
	if l.Rcodes["NOERROR"] != uint64(n) {
		return fmt.Errorf("fill with %d names: %d lost, rcodes %v", n, l.Lost, l.Rcodes)
	}
	return nil
}

// load runs the generator.
func (b *bench) load(ctx context.Context, args ...string) (*load, error) {
	var stdout, stderr bytes.Buffer
	all := []string{
		"-c", clientCPU, filepath.Join(b.tools, "load"), "-json", "-names", pattern,
		"-server", serverAddr + ":53", "-duration", b.duration.String(),
	}
	p, err := b.network.client.Start(lab.Command{
		Path: "taskset", Args: append(all, args...), Stdout: &stdout, Stderr: &stderr,
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		_ = p.Stop(ctx)
		return nil, ctx.Err()
	}
	if err := p.Err(); err != nil {
		return nil, fmt.Errorf("load: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	l := &load{}
	if err := json.Unmarshal(stdout.Bytes(), l); err != nil {
		return nil, fmt.Errorf("read the generator's report: %w", err)
	}
	return l, nil
}
