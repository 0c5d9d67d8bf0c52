package deploy

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/dnsguard/dnsguard/internal/config"
)

var chartDir = filepath.Join("helm", "dnsguard")

func loadChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// template returns what helm template would print, for values as YAML. Where no default
// is taken away, the strict rendering prints the same: the templates ask for no value that
// there is not.
func template(t *testing.T, namespace, values string) (string, error) {
	t.Helper()
	c := loadChart(t)
	out, err := Chart(c, namespace, values)
	if err == nil && !strings.Contains(values, "null") {
		if strict, err := renderWith(engine.Engine{Strict: true}, c, namespace, values); err != nil || !bytes.Equal(strict, out) {
			t.Errorf("strictly: %v\n%s", err, cmp.Diff(string(out), string(strict)))
		}
	}
	return string(out), err
}

func renderChart(t *testing.T, values string) objects {
	t.Helper()
	text, err := template(t, "kube-system", values)
	if err != nil {
		t.Fatal(err)
	}
	all, err := decode([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return all
}

// equal compares two renderings object by object, and their configurations by what
// they say.
func equal(t *testing.T, got, want objects) {
	t.Helper()
	for _, all := range []objects{got, want} {
		cm := the[*corev1.ConfigMap](t, all)
		var values any
		if err := yaml.Unmarshal([]byte(cm.Data["config.yaml"]), &values); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		cm.Data["config.yaml"] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// TestChart: as it stands it is the manifest.
func TestChart(t *testing.T) {
	all := renderChart(t, "")
	check(t, all)
	equal(t, all, decodeFile(t, "daemonset.yaml"))
}

// digest is an image's.
const digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// TestChartValues: other settings pass the same checks, and lead to what the overlays
// are.
func TestChartValues(t *testing.T) {
	for name, c := range map[string]struct {
		values string
		same   string // the overlay whose objects these are, but for the ConfigMap's text
		test   func(t *testing.T, all objects)
	}{
		"canary":       {values: `nodeSelector: {dnsguard.io/canary: "true"}`, same: "canary"},
		"link-local":   {values: `config: {listen: [169.254.20.10], intercept: {mode: link-local}}`, same: "link-local"},
		"ipvs":         {values: `config: {listen: [169.254.20.10], intercept: {mode: link-local}, guard: {enabled: false}}`, same: "ipvs"},
		"nodelocaldns": {values: `config: {listen: [169.254.20.10]}`, same: "nodelocaldns"},
		"rke2":         {values: `config: {kubernetes: {dnsService: kube-system/rke2-coredns-rke2-coredns}}`, same: "rke2"},
		"istio": {values: `{
			config: {limits: {inFlight: 10000, inFlightPerClient: 2000}, guard: {evidence: true}},
			resources: {requests: {memory: 205Mi}, limits: {memory: 256Mi}}}`, same: "istio"},
		"guard-dry-run": {values: `{
			config: {listen: ['127.0.0.1:10053'], http: ':9254', intercept: {mode: none}, guard: {dryRun: true, services: [kube-system/kube-dns, kube-system/kube-dns-upstream]}},
			capabilities: [NET_ADMIN]}`, same: "guard-dry-run"},
		"iptables": {values: `{
			image: {tag: dev-iptables}, config: {intercept: {backend: iptables}}, capabilities: [NET_ADMIN, NET_BIND_SERVICE, NET_RAW],
			extraVolumes: [{name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}],
			extraVolumeMounts: [{name: xtables-lock, mountPath: /run/xtables.lock}]}`, same: "iptables"},
		"cilium": {values: `{
			hostNetwork: false, capabilities: [NET_BIND_SERVICE], extraArgs: ['--listen=$(POD_IP)'],
			config: {listen: [127.0.0.1], kubernetes: {dnsService: kube-system/kube-dns-upstream}, intercept: {mode: none}, guard: {enabled: false}}}`, test: func(t *testing.T, all objects) {
			// The chart has no redirection; the pods are the overlay's.
			want := render(t, filepath.Join("overlays", "cilium"))
			ds := the[*appsv1.DaemonSet](t, want)
			got := the[*appsv1.DaemonSet](t, all)
			if diff := cmp.Diff(ds, got, anyOrder()); diff != "" {
				t.Errorf("(-overlay +chart)\n%s", diff)
			}
		}},
		"services elsewhere": {values: `config: {guard: {services: [kube-system/kube-dns, dns/stub, dns/other]}}`, test: func(t *testing.T, all objects) {
			if all["Role dns/dnsguard"] == nil || all["RoleBinding dns/dnsguard"] == nil {
				t.Errorf("no role in dns: %v", all.keys())
			}
		}},
		"large": {values: `{config: {cache: {size: 256Mi}, limits: {inFlight: 1000000}}, resources: {requests: {cpu: 1, memory: 800Mi}, limits: {memory: 1000Mi}}}`},
		"another registry": {values: `{image: {repository: registry.example/dnsguard, tag: v1}, imagePullSecrets: [{name: pull}], podLabels: {team: dns}, podAnnotations: {example.com/a: b}}`, test: func(t *testing.T, all objects) {
			p := the[*appsv1.DaemonSet](t, all).Spec.Template
			if p.Spec.Containers[0].Image != "registry.example/dnsguard:v1" || p.Spec.ImagePullSecrets[0].Name != "pull" || p.Labels["team"] != "dns" || p.Annotations["example.com/a"] != "b" {
				t.Errorf("%+v", p)
			}
		}},
		"by digest": {values: `image: {repository: "registry.example:5000/dnsguard", digest: "` + digest + `"}`, test: func(t *testing.T, all objects) {
			if c := the[*appsv1.DaemonSet](t, all).Spec.Template.Spec.Containers[0]; c.Image != "registry.example:5000/dnsguard@"+digest {
				t.Errorf("%s", c.Image)
			}
		}},
		"monitored": {values: `podMonitor: {enabled: true}`, test: func(t *testing.T, all objects) {
			want := decodeFile(t, filepath.Join("monitoring", "podmonitor.yaml"))
			if diff := cmp.Diff(the[*unstructured.Unstructured](t, want), the[*unstructured.Unstructured](t, all)); diff != "" {
				t.Errorf("(-monitoring/podmonitor.yaml +chart)\n%s", diff)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			all := renderChart(t, c.values)
			check(t, all)
			if c.test != nil {
				c.test(t, all)
			}
			if c.same == "" {
				return
			}
			want := render(t, filepath.Join("overlays", c.same))
			// The chart writes defaults out that the overlay leaves.
			if a, b := configOf(t, all).Hash(), configOf(t, want).Hash(); a != b {
				t.Errorf("the configuration is another:\n%s\n%s", the[*corev1.ConfigMap](t, all).Data["config.yaml"], the[*corev1.ConfigMap](t, want).Data["config.yaml"])
			}
			the[*corev1.ConfigMap](t, all).Data = the[*corev1.ConfigMap](t, want).Data
			if diff := cmp.Diff(want, all, anyOrder()); diff != "" {
				t.Errorf("(-overlay +chart)\n%s", diff)
			}
		})
	}
}

// TestChartAlerts: the chart's are those of monitoring/, and lead to the page that its
// values name.
func TestChartAlerts(t *testing.T) {
	ours, err := os.ReadFile(filepath.Join("monitoring", "prometheusrule.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for values, page := range map[string]string{
		`prometheusRule: {enabled: true}`:                                                      runbooks,
		`prometheusRule: {enabled: true, runbookURL: null}`:                                    runbooks,
		`prometheusRule: {enabled: true, runbookURL: "https://wiki.example/dns?rev=$1&x=%20"}`: "https://wiki.example/dns?rev=$1&x=%20",
	} {
		want, err := decode([]byte(strings.ReplaceAll(string(ours), runbooks, page)))
		if err != nil {
			t.Fatal(err)
		}
		all := renderChart(t, values)
		check(t, all)
		if diff := cmp.Diff(the[*unstructured.Unstructured](t, want), the[*unstructured.Unstructured](t, all)); diff != "" {
			t.Errorf("%s (-monitoring/prometheusrule.yaml +chart)\n%s", values, diff)
		}
	}
}

// anyOrder compares lists of named things as the API server does, by name.
func anyOrder() cmp.Option {
	return cmp.Options{
		cmpopts.SortSlices(func(a, b corev1.EnvVar) bool { return a.Name < b.Name }),
		cmpopts.SortSlices(func(a, b corev1.Volume) bool { return a.Name < b.Name }),
		cmpopts.SortSlices(func(a, b corev1.VolumeMount) bool { return a.Name < b.Name }),
	}
}

// TestChartRefuses: what is wrong is refused before anything is applied.
func TestChartRefuses(t *testing.T) {
	for name, c := range map[string]struct{ values, says string }{
		"unknown value":            {`imge: {}`, "imge"},
		"unknown key":              {`config: {intercept: {mod: cluster-ip}}`, "mod"},
		"no such mode":             {`config: {intercept: {mode: clusterip}}`, "mode"},
		"text for a number":        {`config: {limits: {inFlight: many}}`, "inFlight"},
		"a word for a switch":      {`config: {guard: {enabled: "yes"}}`, "enabled"},
		"a Service without dot":    {`config: {guard: {services: [kube-dns]}}`, "services"},
		"a duration without unit":  {`config: {timeouts: {retry: "700"}}`, "retry"},
		"out of range":             {`config: {intercept: {rulePriority: 0}}`, "rulePriority"},
		"no servers":               {`config: {upstreams: [{zones: ["."]}]}`, "servers"},
		"no memory":                {`resources: {requests: {memory: null}}`, "memory"},
		"memory of no size":        {`resources: {limits: {memory: ""}}`, "memory"},
		"no cluster domain":        {`config: {clusterDomain: ""}`, "clusterDomain"},
		"pod network, rules":       {`{hostNetwork: false, config: {guard: {enabled: false}}}`, "hostNetwork: false"},
		"pod network, guard":       {`{hostNetwork: false, config: {intercept: {mode: none}}}`, "hostNetwork: false"},
		"an argument that is none": {`extraArgs: [cleanup]`, "extraArgs"},
		"pull policy":              {`image: {pullPolicy: Sometimes}`, "pullPolicy"},
		"a runbook within one":     {`prometheusRule: {runbookURL: "https://a.example/b#c"}`, "runbookURL"},
		"a runbook in the tree":    {`prometheusRule: {runbookURL: docs/OPERATIONS.md}`, "runbookURL"},
		"no digest":                {`image: {digest: "sha256:1"}`, "digest"},
		"a digest for a name":      {`image: {repository: "r@` + digest + `"}`, "repository"},
		"tag and digest":           {`image: {tag: v1, digest: "` + digest + `"}`, "image.tag and image.digest are both set"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, "kube-system", c.values)
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("another namespace", func(t *testing.T) {
		if _, err := template(t, "default", ""); err == nil || !strings.Contains(err.Error(), "install into the namespace of config.kubernetes.dnsService, kube-system") {
			t.Errorf("%v", err)
		}
	})
}

// TestChartSchema: the schema knows every key of the configuration, and no other.
func TestChartSchema(t *testing.T) {
	var schema node
	data, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&schema); err != nil {
		t.Fatal(err)
	}
	got := schema.Properties["config"].leaves("")
	slices.Sort(got)
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	config.RegisterFlags(fs)
	var want []string
	fs.VisitAll(func(f *flag.Flag) { want = append(want, f.Name) })
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys (-configuration +schema)\n%s", diff)
	}
	// And every value of the chart.
	values := slices.Sorted(maps.Keys(loadChart(t).Values))
	known := slices.Sorted(maps.Keys(schema.Properties))
	if diff := cmp.Diff(append(values, "global"), known, cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("values (-values.yaml +schema)\n%s", diff)
	}
}

// node is a JSON schema, as far as it matters here.
type node struct {
	Properties map[string]node `json:"properties"`
}

func (n node) leaves(path string) []string {
	if len(n.Properties) == 0 {
		return []string{path}
	}
	var out []string
	for name, p := range n.Properties {
		out = append(out, p.leaves(strings.TrimPrefix(path+"."+name, "."))...)
	}
	return out
}
