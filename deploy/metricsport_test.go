package deploy

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/relabel"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/dnsguard/dnsguard/internal/config"
)

// checkMetrics: Prometheus finds the pods' pages where the configuration has them, by the
// annotations and by the PodMonitor, and looks for none where there is none.
func checkMetrics(t *testing.T, cfg *config.Config, all objects, ds *appsv1.DaemonSet) {
	t.Helper()
	host, port, err := net.SplitHostPort(cfg.HTTP)
	if err != nil && cfg.HTTP != "" {
		t.Fatal(err)
	}
	if addr, err := netip.ParseAddr(host); err == nil && addr.IsLoopback() {
		port = ""
	}
	scrape := "true"
	if port == "" {
		scrape = ""
	}
	annotations := ds.Spec.Template.Annotations
	if annotations["prometheus.io/port"] != port || annotations["prometheus.io/scrape"] != scrape {
		t.Errorf("metrics are on %q, annotations %v", cfg.HTTP, annotations)
	}
	monitors := []*unstructured.Unstructured{the[*unstructured.Unstructured](t, decodeFile(t, filepath.Join("monitoring", "podmonitor.yaml")))}
	for _, u := range of[*unstructured.Unstructured](all) {
		if u.GetKind() == "PodMonitor" {
			monitors = append(monitors, u)
		}
	}
	for _, m := range monitors {
		for _, ip := range []string{"192.0.2.1", "2001:db8::1"} {
			want := ""
			if port != "" {
				want = net.JoinHostPort(ip, port)
			}
			if got := target(t, m, ip, annotations); got != want {
				t.Errorf("PodMonitor: a pod at %s is asked at %q, want %q", ip, got, want)
			}
		}
	}
}

// target returns the address at which Prometheus asks a pod that a PodMonitor selects, as
// service discovery and the operator tell it of the pod; "" if it does not.
func target(t *testing.T, monitor *unstructured.Unstructured, ip string, annotations map[string]string) string {
	t.Helper()
	data, err := yaml.Marshal(monitor.Object["spec"])
	if err != nil {
		t.Fatal(err)
	}
	// The fields that Prometheus has, under the operator's names.
	var spec struct {
		PodMetricsEndpoints []struct {
			Path        string `json:"path"`
			Interval    string `json:"interval"`
			Relabelings []struct {
				Action       relabel.Action    `json:"action"`
				SourceLabels []model.LabelName `json:"sourceLabels"`
				Regex        string            `json:"regex"`
				Replacement  string            `json:"replacement"`
				TargetLabel  string            `json:"targetLabel"`
			} `json:"relabelings"`
		} `json:"podMetricsEndpoints"`
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
	}
	if err := yaml.UnmarshalStrict(data, &spec); err != nil {
		t.Fatal(err)
	}
	if len(spec.PodMetricsEndpoints) != 1 || spec.PodMetricsEndpoints[0].Path != "/metrics" {
		t.Fatalf("%s", data)
	}
	var rules []*relabel.Config
	for _, r := range spec.PodMetricsEndpoints[0].Relabelings {
		c := relabel.DefaultRelabelConfig
		c.SourceLabels, c.TargetLabel = r.SourceLabels, r.TargetLabel
		if r.Action != "" {
			c.Action = r.Action
		}
		if r.Regex != "" {
			c.Regex = relabel.MustNewRegexp(r.Regex)
		}
		if r.Replacement != "" {
			c.Replacement = r.Replacement
		}
		if err := c.Validate(model.UTF8Validation); err != nil {
			t.Fatal(err)
		}
		rules = append(rules, &c)
	}
	pod := labels.NewBuilder(labels.FromStrings(
		model.AddressLabel, ip, "__meta_kubernetes_pod_ip", ip, "__meta_kubernetes_pod_node_name", "node-1",
		"__meta_kubernetes_pod_container_init", "false",
	))
	for name, value := range annotations {
		pod.Set("__meta_kubernetes_pod_annotation_"+strings.NewReplacer(".", "_", "/", "_", "-", "_").Replace(name), value)
	}
	if !relabel.ProcessBuilder(pod, rules...) {
		return ""
	}
	address := pod.Get(model.AddressLabel)
	if pod.Get("node") != "node-1" || pod.Get("instance") != address {
		t.Errorf("node %q, instance %q of %q", pod.Get("node"), pod.Get("instance"), address)
	}
	return address
}

// TestChartPort: another port of the metrics is everywhere the other port.
func TestChartPort(t *testing.T) {
	const monitored = `, podMonitor: {enabled: true}}`
	for _, http := range []string{`":9300"`, `"0.0.0.0:9300"`, `"[::]:9300"`} {
		text, err := template(t, "kube-system", `{config: {http: `+http+`}`+monitored)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, "9253") || strings.Count(text, "9300") != 2 { // configuration and annotation
			t.Errorf("http %s:\n%s", http, text)
		}
		check(t, renderChart(t, `{config: {http: `+http+`}`+monitored))
	}
	for _, http := range []string{`""`, `"127.0.0.1:9300"`, `"[::1]:9300"`} {
		if _, err := template(t, "kube-system", `{config: {http: `+http+`}`+monitored); err == nil || !strings.Contains(err.Error(), "podMonitor.enabled needs config.http") {
			t.Errorf("http %s: %v", http, err)
		}
		check(t, renderChart(t, `{config: {http: `+http+`}}`))
	}
	if _, err := template(t, "kube-system", `podAnnotations: {prometheus.io/port: "9300"}`); err == nil || !strings.Contains(err.Error(), "prometheus.io/port is made of config.http") {
		t.Error(err)
	}
}
