package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab"
)

// podResolvConf is what kubelet writes for a pod of the namespace default.
const podResolvConf = `search default.svc.cluster.local svc.cluster.local cluster.local
nameserver 10.96.0.10
options ndots:5
`

// TestSearch: glibc in a pod finds the same for every kind of name whether the node
// finishes its search or not, and without dnsguard; what it costs is counted.
func TestSearch(t *testing.T) {
	w := newWorld(t, "nftables")
	pod := w.addPod(w.nodes[1], "endpoint")
	w.searchServices()
	names := []string{
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		"kube-dns.kube-system", "headless", "headless.default", "outside", "outside.default.svc",
		"www.example.com", "api.example.com", "v4only.example.com", "www.example.com.",
		"nobody", "nobody.default", "nobody.example.com",
	}
	w.await("the headless Service's pod in CoreDNS", func(context.Context) error {
		for _, d := range w.dns {
			if found, _, err := w.getent(d.IP4.String(), "headless"); err != nil || !strings.Contains(found, pod.IP4.String()) {
				return fmt.Errorf("%s: %q, %w", d.Name, found, err)
			}
		}
		return nil
	})
	type row struct {
		found     string
		datagrams int
	}
	look := func() map[string]row {
		rows := map[string]row{}
		for _, name := range names {
			found, datagrams, err := w.getent(kubelab.DNS4.Addr().String(), name)
			w.must(err)
			rows[name] = row{found, datagrams}
		}
		return rows
	}
	alone := look()
	g := w.guard(w.nodes[0], "search: {collapse: false}")
	off := look()
	w.leave(g)
	g = w.guard(w.nodes[0])
	on := look()
	walks, err := g.Metric(w.soon(), "dnsguard_search_walks_total", `kind="collapse"`, `result="answered"`)
	w.must(err)
	w.leave(g)
	fewer := 0
	for _, name := range names {
		a := alone[name]
		t.Logf("%-40s datagrams alone/off/on %d/%d/%d: %s", name, a.datagrams, off[name].datagrams, on[name].datagrams, a.found)
		if strings.HasPrefix(name, "nobody") != (a.found == "") {
			t.Errorf("%s without dnsguard: %q", name, a.found)
		}
		if off[name].found != a.found || on[name].found != a.found {
			t.Errorf("%s: without dnsguard %q, collapse off %q, on %q", name, a.found, off[name].found, on[name].found)
		}
		if on[name].datagrams > a.datagrams {
			t.Errorf("%s costs %d datagrams with collapse, %d without dnsguard", name, on[name].datagrams, a.datagrams)
		}
		if on[name].datagrams < a.datagrams {
			fewer++
		}
	}
	if got, was := on["www.example.com"].datagrams, alone["www.example.com"].datagrams; got != 2 || was != 8 {
		t.Errorf("www.example.com costs %d datagrams, %d without dnsguard; want 2 and 8", got, was)
	}
	t.Logf("%d names found alike with collapse on, off and without dnsguard; %d cost less, %v walks finished", len(names), fewer, walks)
}

// searchServices makes a headless and an ExternalName Service, until the test's
// end.
func (w *world) searchServices() {
	w.t.Helper()
	services := []*corev1.Service{
		{
			ObjectMeta: metav1.ObjectMeta{Name: "headless"},
			Spec: corev1.ServiceSpec{
				ClusterIP: corev1.ClusterIPNone, Selector: map[string]string{"app": "endpoint"},
				Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
			},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Name: "outside"},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "api.example.com"},
		},
	}
	for _, s := range services {
		_, err := w.Core.Services("default").Create(w.soon(), s, metav1.CreateOptions{})
		w.must(err)
		w.t.Cleanup(func() {
			if err := w.Core.Services("default").Delete(context.Background(), s.Name, metav1.DeleteOptions{}); err != nil {
				w.t.Error(err)
			}
		})
	}
}

// getent has glibc look a name up in the client pod, and returns the addresses it
// finds and how many datagrams that took.
func (w *world) getent(nameserver, name string) (found string, datagrams int, err error) {
	const script = `mount --bind /run/resolv.conf /etc/resolv.conf && mount --bind /run/nsswitch.conf /etc/nsswitch.conf && exec getent ahosts "$0"`
	before, err := datagramsSent(w.client.Namespace)
	if err != nil {
		return "", 0, err
	}
	out := new(kubelab.Log)
	p, err := w.client.Start(lab.Command{
		Path: "/bin/sh", Args: []string{"-c", script, name}, Stdout: out, Stderr: out,
		Files: map[string][]byte{
			"resolv.conf":   []byte(strings.Replace(podResolvConf, kubelab.DNS4.Addr().String(), nameserver, 1)),
			"nsswitch.conf": []byte("hosts: dns\n"),
		},
	})
	if err != nil {
		return "", 0, err
	}
	<-p.Done()
	if p.Err() != nil && out.String() != "" { // getent itself says nothing
		return "", 0, fmt.Errorf("getent %s: %w: %s", name, p.Err(), out)
	}
	sent, err := datagramsSent(w.client.Namespace)
	var all []string
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) > 0 {
			all = append(all, f[0])
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), " "), sent - before, err
}

// datagramsSent returns how many UDP datagrams have been sent in a namespace.
func datagramsSent(ns *lab.Namespace) (int, error) { return udpCounter(ns, "OutDatagrams") }

// udpCounter reads one of the kernel's counters of a namespace.
func udpCounter(ns *lab.Namespace, name string) (int, error) {
	var text []byte
	err := ns.Do(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	})
	if err != nil {
		return 0, err
	}
	var names []string
	for line := range bytes.Lines(text) {
		switch fields := strings.Fields(string(line)); {
		case fields[0] != "Udp:":
		case names == nil:
			names = fields
		default:
			return strconv.Atoi(fields[slices.Index(names, name)])
		}
	}
	return 0, fmt.Errorf("no UDP counters in %q", text)
}
