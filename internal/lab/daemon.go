package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	daemonStart = 15 * time.Second       // until the daemon answers
	daemonStop  = 5 * time.Second        // from SIGTERM to its end; it drains
	askTimeout  = 500 * time.Millisecond // of one attempt while it starts
	askAgain    = 20 * time.Millisecond  // after an attempt that failed at once
	logTail     = 4 << 10                // octets of its log kept for an error
)

// daemonConfig serves an address of the node from the Service behind
// kube-proxy's rules, without Kubernetes, interception and guard: what is left
// is the resolver. Its files are in a /run that ends with the process.
const daemonConfig = `
listen: [%s]
control: /run/dnsguard/control.sock
http: "127.0.0.1:9253"
clusterDomain: cluster.local
kubernetes: {source: none}
intercept: {mode: none}
upstreams:
  - zones: ["."]
    servers: [%s]
guard: {enabled: false}
log: {level: info, format: text}
`

// daemon is a running dnsguard.
type daemon struct {
	process *Process
	log     *tailWriter
}

// startDaemon starts "dnsguard run" on the node and returns when it answers
// what the pod asks it.
func startDaemon(ctx context.Context, exe string, l *Lab, listen netip.Addr, from *Pod, name string) (*daemon, error) {
	if err := l.Node.AddAddress(listen); err != nil {
		return nil, err
	}
	d := &daemon{log: &tailWriter{limit: logTail}}
	config := fmt.Sprintf(daemonConfig, listen, l.DNS.Addr(listen.Is4()).Addr())
	p, err := l.Node.Start(Command{
		Path:   exe,
		Args:   []string{"run", "--config", "/run/dnsguard/config.yaml"},
		Stdout: d.log,
		Stderr: d.log,
		Files:  map[string][]byte{"dnsguard/config.yaml": []byte(config)},
	})
	if err != nil {
		return nil, err
	}
	d.process = p
	if err := d.awaitAnswer(ctx, from, netip.AddrPortFrom(listen, dnsPort), name); err != nil {
		return nil, errors.Join(err, d.stop())
	}
	return d, nil
}

// awaitAnswer asks until there is an answer.
func (d *daemon) awaitAnswer(ctx context.Context, from *Pod, server netip.AddrPort, name string) error {
	ctx, cancel := context.WithTimeout(ctx, daemonStart)
	defer cancel()
	for {
		attempt, cancelAttempt := context.WithTimeout(ctx, askTimeout)
		reply, err := Ask(attempt, from.Namespace, "udp", server, name, dns.TypeA)
		cancelAttempt()
		if err == nil && reply.Rcode == dns.RcodeSuccess {
			return nil
		}
		select {
		case <-time.After(askAgain):
		case <-d.process.Done():
			return fmt.Errorf("dnsguard ended before it answered: %w\n%s", d.process.Err(), d.log)
		case <-ctx.Done():
			return fmt.Errorf("dnsguard does not answer on %v (last attempt: %w): %w\n%s", server, err, ctx.Err(), d.log)
		}
	}
}

// stop ends the daemon as Kubernetes would.
func (d *daemon) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), daemonStop)
	defer cancel()
	if err := d.process.Stop(ctx); err != nil {
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
