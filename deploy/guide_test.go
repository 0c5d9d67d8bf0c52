package deploy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/strvals"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"github.com/dnsguard/dnsguard/internal/config"
)

// TestGuide: what docs/OPERATIONS.md tells operators to write is what the programs
// read, and what it points to is there.
func TestGuide(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "docs", "OPERATIONS.md"))
	if err != nil {
		t.Fatal(err)
	}
	guide := string(data)

	settings := regexp.MustCompile("`((?:upstreams|cache|limits|guard|intercept|kubernetes|timeouts|search): [{\\[][^`]*)`").FindAllStringSubmatch(guide, -1)
	if len(settings) < 4 {
		t.Errorf("%d settings", len(settings))
	}
	for _, m := range settings {
		if _, err := config.Parse("guide", []byte(m[1]), nil); err != nil {
			t.Errorf("%s: %v", m[1], err)
		}
	}

	policies, patches := 0, 0
	for _, m := range regexp.MustCompile("(?s)```yaml\n(egress:.*?)```").FindAllStringSubmatch(guide, -1) {
		var spec networkingv1.NetworkPolicySpec
		if err := yaml.UnmarshalStrict([]byte(m[1]), &spec); err != nil || len(spec.Egress) == 0 {
			t.Errorf("%v\n%s", err, m[1])
		}
		policies++
	}
	for _, m := range regexp.MustCompile(`patch ds [^\n]* -p '([^']*)'`).FindAllStringSubmatch(guide, -1) {
		var ds appsv1.DaemonSet
		if err := yaml.UnmarshalStrict([]byte(m[1]), &ds); err != nil || ds.Spec.Template.Spec.Affinity == nil {
			t.Errorf("%v\n%s", err, m[1])
		}
		patches++
	}
	if policies == 0 || patches == 0 {
		t.Errorf("%d policies, %d patches", policies, patches)
	}

	// A Service in another namespace: every object and every reference is there, as the
	// chart has it.
	elsewhere := regexp.MustCompile("(?s)```yaml\n([^`]*namespace: (openshift-dns)\n[^`]*)```").FindStringSubmatch(guide)
	if elsewhere == nil {
		t.Fatal("no kustomization for another namespace")
	}
	all := renderBeside(t, elsewhere[1], elsewhere[2])
	removed := renderBeside(t, "resources: [../remove]\nnamespace: "+elsewhere[2]+"\n", elsewhere[2])
	if diff := cmp.Diff(all.keys(), removed.keys()); diff != "" {
		t.Errorf("what is removed (-kustomization +remove)\n%s", diff)
	}
	text, err := template(t, elsewhere[2], "config: {kubernetes: {dnsService: openshift-dns/dns-default}}")
	if err != nil {
		t.Fatal(err)
	}
	chart, err := decode([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if a, b := configOf(t, chart).Hash(), configOf(t, all).Hash(); a != b {
		t.Errorf("the chart's configuration is another:\n%s\n%s", the[*corev1.ConfigMap](t, chart).Data, the[*corev1.ConfigMap](t, all).Data)
	}
	the[*corev1.ConfigMap](t, chart).Data = the[*corev1.ConfigMap](t, all).Data
	if diff := cmp.Diff(all, chart, anyOrder()); diff != "" {
		t.Errorf("(-kustomization +chart)\n%s", diff)
	}

	// What Helm is told to set gives objects that hold together.
	helm := regexp.MustCompile(`helm (?:install|upgrade) dnsguard deploy/helm/dnsguard -n (\S+)([^\n]*)`).FindAllStringSubmatch(guide, -1)
	for _, m := range helm {
		values := map[string]any{}
		for _, set := range regexp.MustCompile(`--set '?([^' ]+)`).FindAllStringSubmatch(m[2], -1) {
			if err := strvals.ParseInto(set[1], values); err != nil {
				t.Errorf("%s: %v", m[0], err)
			}
		}
		text, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		rendered, err := template(t, m[1], string(text))
		if err != nil {
			t.Errorf("%s: %v", m[0], err)
			continue
		}
		all, err := decode([]byte(rendered))
		if err != nil {
			t.Fatal(err)
		}
		check(t, all)
	}
	if len(helm) < 3 {
		t.Errorf("%d commands for Helm", len(helm))
	}

	for _, path := range regexp.MustCompile(`(?:deploy|scripts)/[a-zA-Z0-9_./-]+`).FindAllString(guide, -1) {
		path = strings.TrimSuffix(strings.ReplaceAll(path, "overlays/NAME", "overlays"), ".")
		if _, err := os.Stat(filepath.Join("..", path)); err != nil {
			t.Error(err)
		}
	}
	// Links within the page lead somewhere.
	headings := anchors(guide)
	for _, m := range regexp.MustCompile(`\]\(#([^)]*)\)`).FindAllStringSubmatch(guide, -1) {
		if !headings[m[1]] {
			t.Errorf("a link to #%s, which is not there", m[1])
		}
	}
	overlays, err := os.ReadDir("overlays")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range overlays {
		if !strings.Contains(guide, "\n| `"+o.Name()+"` |") {
			t.Errorf("the overlay %s is not in the table", o.Name())
		}
	}
}

// renderBeside renders a kustomization in a directory beside the overlays, and checks that
// it is whole and has nothing outside of a namespace.
func renderBeside(t *testing.T, kustomization, namespace string) objects {
	t.Helper()
	dir := t.TempDir()
	for _, part := range []string{"base", "overlays"} {
		if err := os.CopyFS(filepath.Join(dir, part), os.DirFS(part)); err != nil {
			t.Fatal(err)
		}
	}
	yours := filepath.Join(dir, "overlays", "yours")
	if err := os.Mkdir(yours, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(yours, "kustomization.yaml"), []byte(kustomization), 0o600); err != nil {
		t.Fatal(err)
	}
	all := render(t, yours)
	check(t, all)
	for _, o := range all {
		if ns := o.GetNamespace(); ns != "" && ns != namespace {
			t.Errorf("%T %s is in %s", o, o.GetName(), ns)
		}
	}
	return all
}

// anchors returns what a link can lead to in a page, as GitHub makes them of headings.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		slug := strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")
		all[regexp.MustCompile(`[^a-z0-9_-]`).ReplaceAllString(slug, "")] = true
	}
	return all
}
