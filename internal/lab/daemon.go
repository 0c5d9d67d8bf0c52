package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	daemonStart = 15 * time.Second      // until the daemon is ready
	daemonStop  = 5 * time.Second       // from SIGTERM to its end; it drains
	pageTimeout = time.Second           // of one of its pages
	pageLimit   = 1 << 20               // octets of it
	askAgain    = 20 * time.Millisecond // while it starts
	logTail     = 4 << 10               // octets of its log kept for an error
)

// mode is what a daemon does on its node.
type mode int

const (
	absent    mode = iota
	guardOnly      // pods' queries are left to kube-proxy; the guard works
	whole          // queries to the ClusterIP are taken, and the guard works
)

// daemonConfig has a file for the API server. The daemon's files are in a /run
// that ends with the process.
const daemonConfig = `
listen: [%s]
control: /run/dnsguard/control.sock
http: ""
clusterDomain: cluster.local
kubernetes: {source: file, file: /run/dnsguard/cluster.yaml, nodeName: node}
intercept: {mode: %s}
upstreams:
  - zones: ["."]
    servers: [%s]
guard: {enabled: true}
log: {level: info, format: text}
`

// daemon is a running dnsguard.
type daemon struct {
	lab     *Lab
	process *Process
	log     *tailWriter
}

// startDaemon starts "dnsguard run" on the node and returns when it is ready.
// Its cluster has the DNS Service's present endpoints.
func startDaemon(ctx context.Context, exe string, l *Lab, m mode) (*daemon, error) {
	d := &daemon{lab: l, log: &tailWriter{limit: logTail}}
	listen, intercept := "127.0.0.1", "none"
	if m == whole {
		listen, intercept = incidentListen, "cluster-ip"
	}
	config := fmt.Sprintf(daemonConfig, listen, intercept, l.DNS.Addr(true).Addr())
	p, err := l.Node.Start(Command{
		Path:   exe,
		Args:   []string{"run", "--config", "/run/dnsguard/config.yaml"},
		Stdout: d.log,
		Stderr: d.log,
		Files: map[string][]byte{
			"dnsguard/config.yaml":  []byte(config),
			"dnsguard/cluster.yaml": l.DNS.manifest(l.DNS.present()),
		},
	})
	if err != nil {
		return nil, err
	}
	d.process = p
	if err := d.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, d.stop())
	}
	return d, nil
}

// awaitReady asks until the daemon says that it is ready.
func (d *daemon) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, daemonStart)
	defer cancel()
	for {
		_, err := d.page(ctx, "/readyz")
		if err == nil {
			return nil
		}
		select {
		case <-time.After(askAgain):
		case <-d.process.Done():
			return fmt.Errorf("dnsguard ended before it was ready: %w\n%s", d.process.Err(), d.log)
		case <-ctx.Done():
			return fmt.Errorf("dnsguard is not ready (%w): %w\n%s", err, ctx.Err(), d.log)
		}
	}
}

// page gets a page of the daemon over its control socket.
func (d *daemon) page(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.process.ScratchPath("dnsguard/control.sock"))
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://dnsguard"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, pageLimit))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(body)))
	}
	return string(body), err
}

// queries returns how many the daemon has received over UDP.
func (d *daemon) queries(ctx context.Context) (int, error) {
	const series = `dnsguard_queries_total{transport="udp"} `
	body, err := d.page(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, series); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return int(n), err
		}
	}
	return 0, fmt.Errorf("the daemon has no metric %s", series)
}

// tell has the daemon's file say that the Service has these endpoints, as the
// API server would.
func (d *daemon) tell(endpoints ...netip.AddrPort) error {
	file := d.process.ScratchPath("dnsguard/cluster.yaml")
	if err := os.WriteFile(file+".new", d.lab.DNS.manifest(endpoints), 0o600); err != nil {
		return fmt.Errorf("tell dnsguard of endpoints: %w", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("tell dnsguard of endpoints: %w", err)
	}
	return nil
}

// ended tells whether the daemon is no more.
func (d *daemon) ended() bool {
	select {
	case <-d.process.Done():
		return true
	default:
		return false
	}
}

// stop ends the daemon as Kubernetes would, also one that a signal has stopped.
func (d *daemon) stop() error {
	if d.ended() {
		return nil
	}
	_ = d.process.Signal(syscall.SIGCONT) // it may end meanwhile
	ctx, cancel := context.WithTimeout(context.Background(), daemonStop)
	defer cancel()
	if err := d.process.Stop(ctx); err != nil {
		return fmt.Errorf("stop dnsguard: %w\n%s", err, d.log)
	}
	return nil
}

// awaitEnd waits for the end of a daemon that has been told to end.
func (d *daemon) awaitEnd() error {
	select {
	case <-d.process.Done():
	case <-time.After(daemonStop):
		return fmt.Errorf("dnsguard does not end\n%s", d.log)
	}
	if err := d.process.Err(); err != nil {
		return fmt.Errorf("stop dnsguard: %w\n%s", err, d.log)
	}
	return nil
}

// tailWriter keeps the end of what is written to it.
type tailWriter struct {
	limit int

	mu  sync.Mutex
	buf []byte
}

// Write never fails.
func (t *tailWriter) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if cut := len(t.buf) - t.limit; cut > 0 {
		t.buf = t.buf[:copy(t.buf, t.buf[cut:])]
	}
	return len(p), nil
}

// String returns the whole lines that were kept.
func (t *tailWriter) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	if len(b) == t.limit {
		_, b, _ = bytes.Cut(b, []byte("\n"))
	}
	return string(b)
}
