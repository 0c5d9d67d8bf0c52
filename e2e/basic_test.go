package e2e

import (
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
)

// modes are kube-proxy's.
var modes = []string{"iptables", "nftables"}

// TestAnswers: what a pod and the node itself ask at the ClusterIP, over both
// transports and families, is answered through kube-proxy's translation alone,
// and the same with dnsguard, which takes it before; also after dnsguard is gone.
func TestAnswers(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, mode)
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
							for from, ns := range map[string]*kubelab.Pod{"pod": w.client} {
								m, err := w.ask(ns.Namespace, network, server, name, qtype)
								if err != nil {
									t.Errorf("%s, %s at %v: %v", who, from, server, err)
									continue
								}
								answers[network+server.String()+name] = lastData(m)
							}
							if _, err := w.ask(w.nodes[0].Namespace, network, server, name, qtype); err != nil {
								t.Errorf("%s, node at %v: %v", who, server, err)
							}
						}
					}
				}
				return answers
			}
			alone := check("kube-proxy alone")
			g := w.guard(w.nodes[0])
			with := check("with dnsguard")
			for key, want := range alone {
				if with[key] != want {
					t.Errorf("%s: with dnsguard %q, without %q", key, with[key], want)
				}
			}
			taken, err := g.Metric(w.soon(), "dnsguard_queries_total")
			w.must(err)
			if int(taken) < 2*len(alone) {
				t.Errorf("dnsguard took %v of %d queries", taken, 2*len(alone))
			}
			if t.Failed() {
				return
			}
			g.Kill()
			check("after kill -9")
			t.Logf("%s: %d kinds of questions from pod and node, alike with and without dnsguard, and after its death", mode, len(alone))
		})
	}
}

// lastData is the data of an answer's last record, without name and TTL.
func lastData(m *dns.Msg) string {
	last := m.Answer[len(m.Answer)-1]
	return last.String()[len(last.Header().String()):]
}
