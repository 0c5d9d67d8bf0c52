package kube

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// example is a file as an operator would write it.
func example(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "cluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestManifest(t *testing.T) {
	m, err := parseManifest([]byte(example(t)))
	must(t, err)
	got := fmt.Sprint(len(m.services), len(m.slices), len(m.pods), len(m.namespaces))
	if got != "1 2 2 1" {
		t.Fatalf("services, slices, pods, namespaces: %s", got)
	}
	s := newService(m.services[0])
	if got := guarded(kubeDNS, s, []slice{newSlice(m.slices[0]), newSlice(m.slices[1])}); len(got.Ports) != 1 ||
		fmt.Sprint(got.Addrs, got.Ports[0].Endpoints) != "[10.96.0.10 fd00:10:96::a] [{10.244.0.2:53 true false} {10.244.0.3:53 true true} {[fd00:10:244::2]:53 true false}]" {
		t.Errorf("service %+v", got)
	}
}

// TestManifestDefaults is about what an API server would have filled in.
func TestManifestDefaults(t *testing.T) {
	m, err := parseManifest([]byte(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a, namespace: b}
addressType: IPv4
ports: [{port: 53}, {port: 53, protocol: UDP}]
endpoints: [{addresses: [10.244.0.2]}]
`))
	must(t, err)
	if diff := cmp.Diff("map[:[{10.244.0.2:53 true false}]]", fmt.Sprint(newSlice(m.slices[0]))); diff != "" {
		t.Errorf("slice (-want +got):\n%s", diff)
	}
}

func TestManifestProblems(t *testing.T) {
	const (
		ns  = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: a\n"
		svc = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: b}\n"
		eps = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, namespace: b}\n"
		pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: b}\n"
	)
	tests := []struct {
		name, data, want string
	}{
		{"empty", "", "there is no object in it"},
		{"only comments", "# nothing\n---\n# still nothing\n", "there is no object in it"},
		{"not YAML", ns + "---\n" + ns + "\tx: 1\n", "document 2, at or below line 9: not YAML: found a tab character that violates indentation"},
		{"never closed", ns + "---\nkind: [", "document 2, at or below line 6: not YAML: did not find expected node content"},
		{"a list", "- 1\n", `document 1, line 1: kind: is "" of "", want Service, Pod or Namespace of "v1", or EndpointSlice of "discovery.k8s.io/v1"`},
		{
			"another kind", ns + "---\n\napiVersion: v1\nkind: List\nitems: []\n",
			`document 2, line 8: List: kind: is "List" of "v1", want Service, Pod or Namespace of "v1", or EndpointSlice of "discovery.k8s.io/v1"`,
		},
		{
			"another version", "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\n",
			`document 1, line 2: EndpointSlice: kind: is "EndpointSlice" of "discovery.k8s.io/v1beta1", want Service, Pod or Namespace of "v1", or EndpointSlice of "discovery.k8s.io/v1"`,
		},
		{"no name", "apiVersion: v1\nkind: Namespace\n", "document 1, line 1: Namespace: metadata: has no name"},
		{"no namespace", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n", "document 1, line 4: Pod a: metadata: has a namespace: false, want: true"},
		{"a namespace too many", ns + "  namespace: b\n", "document 1, line 4: Namespace b/a: metadata: has a namespace: true, want: false"},
		{"twice", ns + "---\n" + ns, "document 2, line 9: Namespace a: metadata: is the same object as document 1"},
		{
			"unknown key", svc + "spec:\n  ports:\n  - port: 53\n    protokol: UDP\n",
			"document 1, line 7: Service: spec.ports[0].protokol: unknown field",
		},
		{
			"unknown keys, in two documents", ns + "spek: {}\n---\n" + svc + "spec:\n  clusterip: 10.96.0.10\n",
			"document 1, line 5: Namespace: spek: unknown field\ndocument 2, line 11: Service: spec.clusterip: unknown field",
		},
		{
			"doubled key", svc + "spec:\n  clusterIP: 10.96.0.10\n\n  clusterIP: 10.96.0.11\n",
			"document 1, line 7: Service: spec.clusterIP: duplicate field",
		},
		{
			"text for a number", svc + "spec:\n  ports:\n  - name: dns\n    port: \"53\"\n",
			"document 1, line 7: Service: spec.ports.port: is text, want a number that fits into int32",
		},
		{
			"too large a number", svc + "spec:\n  ports:\n  - port: 5300000000\n",
			"document 1, line 6: Service: spec.ports.port: is number 5300000000, want a number that fits into int32",
		},
		{
			"annotation without quotes", ns + "  annotations:\n    a: b\n    dnsguard.io/intercept: false\n",
			"document 1, line 7: Namespace: metadata.annotations: is true or false, want text (in quotes)",
		},
		{
			"mapping for a list", svc + "spec:\n  ports:\n    dns: 53\n",
			"document 1, line 6: Service: spec.ports: is a mapping, want a list",
		},
		{
			"list for text", svc + "spec:\n  clusterIP:\n  - 10.96.0.10\n",
			"document 1, line 6: Service: spec.clusterIP: is a list, want text (in quotes)",
		},
		{
			"alias", svc + "spec:\n  clusterIP: &ip 10.96.0.10\n  clusterIPs:\n  - *ip\n",
			"document 1, line 7: Service: an alias: write out what it stands for",
		},
		{
			"merge", svc + "spec:\n  <<: {clusterIP: 10.96.0.10}\n",
			"document 1, line 5: Service: spec.<<: unknown field",
		},
		{"a key that is a list", svc + "spec:\n  [a]: b\n", "document 1, line 5: Service: a key that is no text"},
		{"a tag", svc + "spec:\n  clusterIP: !ip 10.96.0.10\n", "document 1, line 5: Service: a value with the tag !ip"},
		{"an infinite port", svc + "spec:\n  ports:\n  - port: .inf\n", "document 1, line 6: Service: json: unsupported value: +Inf"},
		{
			"a time that is none", ns + "  creationTimestamp: yesterday\n",
			`document 1, line 1: Namespace: parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday" as "2006"`,
		},
		{
			"addresses of a Service", svc + "spec:\n  clusterIPs:\n  - 10.96.0.10\n  - 10.96.0.300\n  externalIPs: [a]\nstatus:\n  loadBalancer:\n    ingress:\n    - hostname: x\n    - ip: b\n",
			strings.Join([]string{
				`document 1, line 7: Service b/a: spec.clusterIPs[1]: "10.96.0.300" is not an IP address`,
				`document 1, line 8: Service b/a: spec.externalIPs[0]: "a" is not an IP address`,
				`document 1, line 13: Service b/a: status.loadBalancer.ingress[1].ip: "b" is not an IP address`,
			}, "\n"),
		},
		{
			"clusterIP alone", svc + "spec:\n  clusterIP: dns\n",
			`document 1, line 5: Service b/a: spec.clusterIP: "dns" is not an IP address`,
		},
		{
			"ports of a Service", svc + "spec:\n  ports:\n  - name: dns\n    port: 0\n    nodePort: 65536\n",
			"document 1, line 7: Service b/a: spec.ports[0].port: 0 is not a port, want 1 to 65535\n" +
				"document 1, line 8: Service b/a: spec.ports[0].nodePort: 65536 is not a port, want 1 to 65535",
		},
		{
			"addresses of a slice", eps + "addressType: IPv6\nports:\n- port: 70000\nendpoints:\n- addresses: [fd00::1]\n- addresses:\n  - 10.244.0.2\n  - x\n",
			strings.Join([]string{
				"document 1, line 6: EndpointSlice b/a: ports[0].port: 70000 is not a port, want 1 to 65535",
				`document 1, line 10: EndpointSlice b/a: endpoints[1].addresses[0]: "10.244.0.2" is not of type IPv6`,
				`document 1, line 11: EndpointSlice b/a: endpoints[1].addresses[1]: "x" is not an IP address`,
			}, "\n"),
		},
		{
			"address type", eps + "addressType: ipv4\n",
			`document 1, line 4: EndpointSlice b/a: addressType: is "ipv4", want IPv4, IPv6 or FQDN`,
		},
		{
			"no address type", eps,
			`document 1, line 1: EndpointSlice b/a: addressType: is "", want IPv4, IPv6 or FQDN`,
		},
		{
			"addresses of a Pod", pod + "status:\n  podIP: x\n  podIPs:\n  - ip: 10.244.1.5\n  - ip: y\n",
			`document 1, line 5: Pod b/a: status.podIP: "x" is not an IP address` + "\n" +
				`document 1, line 8: Pod b/a: status.podIPs[1].ip: "y" is not an IP address`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m, err := parseManifest([]byte(tt.data))
			if m != nil || err == nil {
				t.Fatalf("accepted: %+v", m)
			}
			if diff := cmp.Diff(tt.want, err.Error()); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(example(f)))
	for doc := range strings.SplitSeq(example(f), "---\n") {
		f.Add([]byte(doc))
	}
	f.Add([]byte("apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: b}\nspec: {ports: [{port: 0x35, name: ~}], clusterIPs: [&a x, *a]}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseManifest(data)
		if (m == nil) == (err == nil) {
			t.Fatalf("manifest %v, error %v", m, err)
		}
		if err != nil {
			return
		}
		// Whatever is accepted can be made a state of, and a second reading
		// makes the same.
		first, second := stateOf(m), stateOf(m)
		if diff := cmp.Diff(first, second); diff != "" {
			t.Errorf("two readings differ:\n%s", diff)
		}
	})
}

func stateOf(m *manifest) string {
	f := newFeeds(Config{Services: []Name{kubeDNS}, DNSService: kubeDNS, Pods: true, NodeName: thisNode, Namespaces: true})
	NewFile("").attach(f)
	m.fill(f)
	f.watches[0].arrived()
	s := f.state(Config{Services: []Name{kubeDNS}, DNSService: kubeDNS}, nil)
	return fmt.Sprintf("%+v %+v %v %v %v", s.Guard, s.DNS, s.Clients, s.Excluded, s.Missing)
}
