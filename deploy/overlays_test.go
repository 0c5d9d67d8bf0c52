package deploy

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/dnsguard/dnsguard/internal/config"
)

// render returns what kubectl apply -k would apply.
func render(t *testing.T, dir string) objects {
	t.Helper()
	data, err := Overlay(dir)
	if err != nil {
		t.Fatal(err)
	}
	all, err := decode(data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	return all
}

// configOf returns a rendering's configuration.
func configOf(t *testing.T, all objects) *config.Config {
	t.Helper()
	cfg, err := config.Parse("config.yaml", []byte(the[*corev1.ConfigMap](t, all).Data["config.yaml"]), nil)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestOverlays: each renders, passes what the base passes, and does what it is for.
func TestOverlays(t *testing.T) {
	want := map[string]func(t *testing.T, cfg *config.Config, all objects){
		"canary": func(t *testing.T, _ *config.Config, all objects) {
			if s := the[*appsv1.DaemonSet](t, all).Spec.Template.Spec.NodeSelector; s["dnsguard.io/canary"] != "true" {
				t.Errorf("nodeSelector %v", s)
			}
		},
		"cilium": func(t *testing.T, cfg *config.Config, all objects) {
			if cfg.Guard.Enabled || cfg.Intercept.Mode != config.InterceptNone {
				t.Errorf("%+v, %+v", cfg.Guard, cfg.Intercept)
			}
			checkRedirect(t, cfg, all)
		},
		"guard-dry-run": func(t *testing.T, cfg *config.Config, _ objects) {
			if !cfg.Guard.Enabled || !cfg.Guard.DryRun || cfg.Intercept.Mode != config.InterceptNone {
				t.Errorf("%+v, %+v", cfg.Guard, cfg.Intercept)
			}
			for _, a := range cfg.Listen {
				if !a.Addr().IsLoopback() {
					t.Errorf("listens on %v", a)
				}
			}
			if cfg.HTTP == ":9253" {
				t.Error("NodeLocal DNSCache has that port")
			}
		},
		"iptables": func(t *testing.T, cfg *config.Config, _ objects) {
			if cfg.Intercept.Backend != config.BackendIPTables {
				t.Errorf("%+v", cfg.Intercept)
			}
		},
		"ipvs": func(t *testing.T, cfg *config.Config, _ objects) {
			if cfg.Intercept.Mode != config.InterceptLinkLocal || cfg.Guard.Enabled {
				t.Errorf("%+v, %+v", cfg.Guard, cfg.Intercept)
			}
		},
		"istio": func(t *testing.T, cfg *config.Config, _ objects) {
			if cfg.Limits.InFlightPerClient < 1000 || !cfg.Guard.Evidence || cfg.Intercept.Mode != config.InterceptClusterIP {
				t.Errorf("%+v, %+v", cfg.Limits, cfg.Guard)
			}
		},
		"link-local": func(t *testing.T, cfg *config.Config, _ objects) {
			if cfg.Intercept.Mode != config.InterceptLinkLocal || len(cfg.Listen) == 0 || !cfg.Listen[0].Addr().IsLinkLocalUnicast() {
				t.Errorf("%+v, %v", cfg.Intercept, cfg.Listen)
			}
		},
		"nodelocaldns": func(t *testing.T, cfg *config.Config, _ objects) {
			if cfg.Intercept.Mode != config.InterceptClusterIP || len(cfg.Listen) != 1 || cfg.Listen[0].String() != "169.254.20.10:53" {
				t.Errorf("%+v, %v", cfg.Intercept, cfg.Listen)
			}
		},
		"rke2": func(t *testing.T, cfg *config.Config, _ objects) {
			want := config.ServiceName{Namespace: "kube-system", Name: "rke2-coredns-rke2-coredns"}
			if cfg.Kubernetes.DNSService != want || !slices.Equal(cfg.Guard.Services, []config.ServiceName{want}) || cfg.Intercept.Mode != config.InterceptClusterIP {
				t.Errorf("%+v, %+v, %+v", cfg.Kubernetes, cfg.Guard, cfg.Intercept)
			}
		},
		"remove": func(t *testing.T, cfg *config.Config, all objects) {
			init := the[*appsv1.DaemonSet](t, all).Spec.Template.Spec.InitContainers
			if len(init) != 1 || init[0].Args[0] != "cleanup" || cfg.Intercept.Mode != config.InterceptNone || cfg.Guard.Enabled {
				t.Errorf("%+v", init)
			}
			// What is applied is what is deleted afterwards.
			for key := range decodeFile(t, "daemonset.yaml") {
				if all[key] == nil {
					t.Errorf("delete -k would leave %s", key)
				}
			}
		},
	}
	dirs, err := os.ReadDir("overlays")
	if err != nil {
		t.Fatal(err)
	}
	if len(dirs) != len(want) {
		t.Errorf("%d overlays, %d are tested", len(dirs), len(want))
	}
	for _, dir := range dirs {
		t.Run(dir.Name(), func(t *testing.T) {
			all := render(t, filepath.Join("overlays", dir.Name()))
			check(t, all)
			if want[dir.Name()] == nil {
				t.Fatal("nothing says what it is for")
			}
			want[dir.Name()](t, configOf(t, all), all)
		})
	}
}

// checkRedirect: the policy leads kube-dns's queries to the pods' ports, and the
// pods' own to somewhere else.
func checkRedirect(t *testing.T, cfg *config.Config, all objects) {
	t.Helper()
	policy := the[*unstructured.Unstructured](t, all).Object
	front, _, _ := unstructured.NestedStringMap(policy, "spec", "redirectFrontend", "serviceMatcher")
	if front["serviceName"] != "kube-dns" || front["namespace"] != "kube-system" {
		t.Errorf("redirects %v", front)
	}
	upstream := the[*corev1.Service](t, all)
	if own := cfg.Kubernetes.DNSService; own.Name == front["serviceName"] || own.Name != upstream.Name || own.Namespace != upstream.Namespace {
		t.Errorf("asks %v, redirects %v, has %s/%s", own, front, upstream.Namespace, upstream.Name)
	}
	ds := the[*appsv1.DaemonSet](t, all)
	labels, _, _ := unstructured.NestedStringMap(policy, "spec", "redirectBackend", "localEndpointSelector", "matchLabels")
	if len(labels) == 0 {
		t.Error("selects everything")
	}
	for key, value := range labels {
		if ds.Spec.Template.Labels[key] != value {
			t.Errorf("selects %v, the pods have %v", labels, ds.Spec.Template.Labels)
		}
	}
	ports, _, _ := unstructured.NestedSlice(policy, "spec", "redirectBackend", "toPorts")
	c := ds.Spec.Template.Spec.Containers[0]
	if len(ports) != 2 || len(c.Ports) != 2 {
		t.Fatalf("ports %v and %+v", ports, c.Ports)
	}
	for i, p := range ports {
		p := p.(map[string]any)
		if p["name"] != c.Ports[i].Name || p["protocol"] != string(c.Ports[i].Protocol) || p["port"] != "53" || c.Ports[i].ContainerPort != 53 {
			t.Errorf("port %v is not %+v", p, c.Ports[i])
		}
	}
}
