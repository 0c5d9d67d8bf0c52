package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
)

// modes are kube-proxy's.
var modes = []string{"iptables", "nftables"}

// TestAnswers: what a pod and the node itself ask at the ClusterIP, over both
// transports and families, is answered through kube-proxy's translation alone, and the
// same with dnsguard, which takes it before, by rules of nftables and of iptables
// beside kube-proxy in both modes; also after dnsguard is gone.
func TestAnswers(t *testing.T) {
	w := newWorld(t, modes...)
	pods := []*kubelab.Pod{w.client, w.addPod(w.nodes[1], "client-b")}
	for i, mode := range modes {
		t.Run(mode, func(t *testing.T) { w.in(t).answers(w.nodes[i], pods[i]) })
	}
}

// answers plays a node.
func (w *world) answers(n *kubelab.Node, pod *kubelab.Pod) {
	t := w.t
	check := func(who string) map[string]string {
		answers := map[string]string{}
		for _, server := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6} {
			for _, network := range []string{"udp", "tcp"} {
				for name, qtype := range map[string]uint16{
					apiName: dns.TypeA, "kube-dns.kube-system.svc.cluster.local.": dns.TypeAAAA,
					"www.example.com.": dns.TypeA, "text.example.com.": dns.TypeTXT,
					"_dns._udp.kube-dns.kube-system.svc.cluster.local.": dns.TypeSRV,
				} {
					if name == "text.example.com." && network == "udp" {
						continue // does not fit
					}
					m, err := w.ask(pod.Namespace, network, server, name, qtype)
					if err != nil {
						t.Errorf("%s, pod at %v: %v", who, server, err)
						continue
					}
					answers[network+server.String()+name] = lastData(m)
					if _, err := w.ask(n.Namespace, network, server, name, qtype); err != nil {
						t.Errorf("%s, node at %v: %v", who, server, err)
					}
				}
			}
		}
		return answers
	}
	alone := check("kube-proxy alone")
	for backend, asks := range map[string]int{"nftables": 2, "iptables": 1} { // iptables takes pods' queries only
		g := w.guard(n, "intercept: {mode: cluster-ip, backend: "+backend+"}")
		with := check("with dnsguard by " + backend)
		for key, want := range alone {
			if with[key] != want {
				t.Errorf("%s: with dnsguard by %s %q, without %q", key, backend, with[key], want)
			}
		}
		taken, err := g.Metric(w.soon(), "dnsguard_queries_total")
		w.must(err)
		if int(taken) < asks*len(alone) {
			t.Errorf("dnsguard by %s took %v of %d queries", backend, taken, asks*len(alone))
		}
		rules := w.ours(n)
		if rules == "" {
			t.Errorf("no rules by %s", backend)
		}
		if backend == "iptables" {
			// kube-proxy writes all of its rules anew, beside ours.
			n.Proxy.Kill()
			w.must(n.StartProxy(w.soon(), n.Proxy.Mode))
			if now := w.ours(n); now != rules {
				t.Errorf("kube-proxy changed our rules:\n%s\nnow\n%s", rules, now)
			}
			check("with dnsguard by iptables and another kube-proxy")
		}
		if t.Failed() {
			return
		}
		g.Kill()
		check("after kill -9, by " + backend)
		g = w.guard(n, "intercept: {mode: cluster-ip, backend: "+backend+"}")
		w.leave(g)
		check("after the end, by " + backend)
		if left := w.ours(n); left != "" {
			t.Errorf("left by %s:\n%s", backend, left)
		}
	}
	t.Logf("%s: %d kinds of questions from pod and node, alike with and without dnsguard, by nftables and by iptables, and after its death and end", n.Proxy.Mode, len(alone))
}

// ours are dnsguard's rules on a node, of both backends, without counts.
func (w *world) ours(n *kubelab.Node) string {
	w.t.Helper()
	var found strings.Builder
	tables, err := kubelab.Output(w.soon(), n.Namespace, "nft", "list", "tables", "inet")
	w.must(err)
	for line := range strings.Lines(tables) {
		if strings.Contains(line, "dnsguard") && !strings.Contains(line, "-fallback") { // it is to stay
			found.WriteString(line)
		}
	}
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		out, err := kubelab.Output(w.soon(), n.Namespace, save, "-t", "raw")
		w.must(err)
		for line := range strings.Lines(out) {
			if strings.Contains(line, "DNSGUARD") && !strings.HasPrefix(line, ":") {
				found.WriteString(line)
			}
		}
	}
	return found.String()
}

// lastData is the data of an answer's last record, without name and TTL.
func lastData(m *dns.Msg) string {
	last := m.Answer[len(m.Answer)-1]
	return last.String()[len(last.Header().String()):]
}
