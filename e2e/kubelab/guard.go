package kubelab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Guard is a running dnsguard, the program under test.
type Guard struct {
	*Program
	Node *Node
}

// guardConfig is the configuration of a node cache beside kube-proxy.
const guardConfig = `
listen: [169.254.20.10, "fd53:dd:20::10"]
control: /run/dnsguard/control.sock
http: ""
clusterDomain: cluster.local
kubernetes: {source: api, kubeconfig: /run/kubeconfig, nodeName: %s}
intercept: {mode: cluster-ip}
guard: {enabled: true}
log: {level: info, format: text}
`

// GuardOnly are the keys with which pods' queries stay on kube-proxy's path.
func GuardOnly() []string {
	return []string{"intercept: {mode: none}", "listen: [127.0.0.1]"}
}

// LaunchGuard starts dnsguard on the node, with keys of the configuration
// replaced, one a line.
func (n *Node) LaunchGuard(more ...string) (*Guard, error) {
	config, err := n.cluster.Kubeconfig(true, "dnsguard", masters)
	if err != nil {
		return nil, err
	}
	text := fmt.Sprintf(guardConfig, n.Name)
	for _, line := range more {
		key, _, _ := strings.Cut(line, ":")
		var kept []string
		for old := range strings.Lines(text) {
			if !strings.HasPrefix(old, key+":") {
				kept = append(kept, strings.TrimSuffix(old, "\n"))
			}
		}
		text = strings.Join(append(kept, line, ""), "\n")
	}
	g := &Guard{Node: n}
	g.Program, err = start(n.Namespace, "dnsguard", n.cluster.components.DNSGuard, []string{"run", "--config", "/run/dnsguard/config.yaml"}, map[string][]byte{
		"kubeconfig": config, "dnsguard/config.yaml": []byte(text),
	}, "KUBE_DNS_SERVICE_HOST="+DNS4.Addr().String()) // as kubelet tells every pod in kube-system
	if err != nil {
		return nil, err
	}
	n.guards = append(n.guards, g)
	return g, nil
}

// StartGuard launches dnsguard and waits until it is ready.
func (n *Node) StartGuard(ctx context.Context, more ...string) (*Guard, error) {
	g, err := n.LaunchGuard(more...)
	if err != nil {
		return nil, err
	}
	return g, g.AwaitReady(ctx)
}

// AwaitReady waits until /readyz says so.
func (g *Guard) AwaitReady(ctx context.Context) error {
	return Await(ctx, "dnsguard is ready on "+g.Node.Name, func(ctx context.Context) error {
		if err := g.Running(); err != nil {
			return err
		}
		page, err := g.Page(ctx, "/readyz")
		if err == nil && !strings.HasPrefix(page, "ok") {
			err = fmt.Errorf("/readyz: %s", page)
		}
		return err
	})
}

// Page gets a page over the control socket, whatever its status.
func (g *Guard) Page(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", g.ScratchPath("dnsguard/control.sock"))
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://dnsguard"+path, http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// Metric sums a metric's series whose labels hold all the texts.
func (g *Guard) Metric(ctx context.Context, name string, labels ...string) (float64, error) {
	page, err := g.Page(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for line := range strings.Lines(page) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		bare, set, _ := strings.Cut(series, "{")
		if !ok || bare != name {
			continue
		}
		for _, l := range labels {
			ok = ok && strings.Contains(set, l)
		}
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil {
			sum += v
		}
	}
	return sum, nil
}
