package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestChartAbsent takes away each value of the chart, by null, which is Helm's word for it,
// and by what is empty of its kind. Either that is refused under the value's name, or the
// objects are as if it had never been there: complete, but for what an operator has a right
// to do without.
func TestChartAbsent(t *testing.T) {
	expendable := []string{"affinity", "tolerations", "nodeSelector", "priorityClassName", "resources.limits"}
	defaults, err := template(t, "kube-system", "")
	if err != nil {
		t.Fatal(err)
	}
	chart := map[string]any(loadChart(t).Values)
	refused, changed := 0, 0
	var take func(path []string, v any)
	take = func(path []string, v any) {
		empty := ""
		switch v := v.(type) {
		case string:
			empty = `""`
		case []any:
			empty = `[]`
		case map[string]any:
			empty = `{}`
			for key, v := range v {
				take(append(slices.Clone(path), key), v)
			}
		}
		if len(path) == 0 {
			return
		}
		name := strings.Join(path, ".")
		for _, nothing := range []string{"null", empty} {
			if nothing == "" {
				continue
			}
			values := nothing
			for _, key := range slices.Backward(path[1:]) {
				values = fmt.Sprintf("{%q: %s}", key, values)
			}
			// What is off has to be on, or nobody reads its values.
			if group, ok := chart[path[0]].(map[string]any); ok && len(path) > 1 && group["enabled"] == false && path[1] != "enabled" {
				values = "{enabled: true, " + strings.TrimPrefix(values, "{")
			}
			values = fmt.Sprintf("%s: %s", path[0], values)
			out, err := template(t, "kube-system", values)
			if err != nil {
				refused++
				if !strings.Contains(err.Error(), path[len(path)-1]) || strings.Contains(err.Error(), "executing") {
					t.Errorf("%s: %v", values, err)
				}
				continue
			}
			if out == defaults {
				continue // a map, which Helm merges, or what is empty anyway
			}
			changed++
			t.Run(name+" "+nothing, func(t *testing.T) {
				all, err := decode([]byte(out))
				if err != nil || strings.Contains(out, "<no value>") {
					t.Fatalf("%v\n%s", err, out)
				}
				if said, ok := refusal(t, all); ok {
					if !strings.Contains(said, path[len(path)-1]) {
						t.Errorf("dnsguard check does not name it: %s", said)
					}
					return
				}
				for _, e := range expendable {
					if name == e || strings.HasPrefix(name, e+".") {
						return
					}
				}
				if name+" "+nothing == "capabilities []" { // that is said, and the daemon names what it lacks
					return
				}
				check(t, all)
			})
		}
	}
	take(nil, chart)
	if refused < 15 || changed < 25 {
		t.Errorf("%d values refused, %d taken away", refused, changed)
	}
}

// refusal returns what dnsguard check says against a rendering's configuration.
func refusal(t *testing.T, all objects) (string, bool) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(the[*corev1.ConfigMap](t, all).Data["config.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := dnsguard(t, "check", "--config="+file)
	return out, err != nil
}
