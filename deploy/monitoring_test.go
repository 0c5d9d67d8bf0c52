package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	promparser "github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
	"sigs.k8s.io/yaml"
)

// metric is one of the daemon's.
type metric struct {
	kind   string // counter, gauge, histogram
	labels []string
}

// registered returns the metrics that the daemon's source describes.
func registered(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "cmd", "dnsguard", "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no source: %v", err)
	}
	out := map[string][]string{}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) < 2 {
				return true
			}
			if name, ok := call.Fun.(*ast.Ident); !ok || name.Name != "desc" {
				return true
			}
			var words []string
			for _, a := range call.Args {
				lit, ok := a.(*ast.BasicLit)
				if !ok {
					t.Errorf("%s: a metric whose name is not written out", file)
					return true
				}
				word, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Error(err)
				}
				words = append(words, word)
			}
			out["dnsguard_"+words[0]] = words[2:]
			return true
		})
	}
	return out
}

// documented returns the metrics of docs/metrics.md.
func documented(t *testing.T) map[string]metric {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]metric{}
	row := regexp.MustCompile("(?m)^\\| `(dnsguard_[a-z_]+)`[^|]*\\| (counter|gauge|histogram) \\|([^|]*)\\|")
	word := regexp.MustCompile("(?:^|[ ;,])`([a-z]+)`(?:[:,;]|$)")
	for _, m := range row.FindAllStringSubmatch(string(data), -1) {
		d := metric{kind: m[2]}
		for group := range strings.SplitSeq(m[3], ";") {
			// Before a colon there is the label, behind it are its values.
			name, _, values := strings.Cut(group, ":")
			if values {
				name += ":"
			}
			for _, l := range word.FindAllStringSubmatch(strings.TrimSpace(name), -1) {
				d.labels = append(d.labels, l[1])
			}
		}
		out[m[1]] = d
	}
	return out
}

// TestMetricsDocumented: docs/metrics.md has the metrics that the daemon has, with
// their labels.
func TestMetricsDocumented(t *testing.T) {
	got := map[string][]string{}
	for name, m := range documented(t) {
		got[name] = slices.Sorted(slices.Values(m.labels))
	}
	want := map[string][]string{}
	for name, l := range registered(t) {
		want[name] = slices.Sorted(slices.Values(l))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-daemon +docs/metrics.md)\n%s", diff)
	}
}

// checkExpr: an expression parses, and names metrics and labels that there are.
func checkExpr(t *testing.T, known map[string]metric, text string) {
	t.Helper()
	expr, err := promparser.NewParser(promparser.Options{}).ParseExpr(text)
	if err != nil {
		t.Errorf("%v\n%s", err, text)
		return
	}
	allowed := []string{"instance", "le"}
	selectors := 0
	promparser.Inspect(expr, func(n promparser.Node, _ []promparser.Node) error {
		s, ok := n.(*promparser.VectorSelector)
		if !ok {
			return nil
		}
		selectors++
		m, ok := known[s.Name]
		if base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(s.Name, ""); !ok && known[base].kind == "histogram" {
			m, ok = known[base], true
		}
		switch s.Name {
		case "process_cpu_seconds_total", "process_resident_memory_bytes": // client_golang's
			ok = true
		case "up": // Prometheus's own
			ok = true
		}
		if !ok {
			t.Errorf("there is no metric %s\n%s", s.Name, text)
		}
		allowed = append(allowed, m.labels...)
		for _, l := range s.LabelMatchers {
			if l.Name != model.MetricNameLabel && l.Name != "instance" && l.Name != "le" && !slices.Contains(m.labels, l.Name) {
				t.Errorf("%s has no label %s\n%s", s.Name, l.Name, text)
			}
		}
		return nil
	})
	if selectors == 0 {
		t.Errorf("looks at nothing: %s", text)
	}
	promparser.Inspect(expr, func(n promparser.Node, _ []promparser.Node) error {
		switch n := n.(type) {
		case *promparser.AggregateExpr:
			for _, l := range n.Grouping {
				if !slices.Contains(allowed, l) {
					t.Errorf("by %s: none has that label\n%s", l, text)
				}
			}
		case *promparser.MatrixSelector:
			name := n.VectorSelector.(*promparser.VectorSelector).Name
			if known[name].kind == "gauge" && !strings.Contains(text, "_over_time(") {
				t.Errorf("a rate of the gauge %s\n%s", name, text)
			}
		}
		return nil
	})
}

// rules returns the alerts of rules.yaml.
func rules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	// It parses the templates of the annotations as well.
	groups, errs := rulefmt.ParseFile(filepath.Join("monitoring", "rules.yaml"), false, model.UTF8Validation, promparser.NewParser(promparser.Options{}), slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	var all []rulefmt.Rule
	for _, g := range groups.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// runbooks is docs/OPERATIONS.md where people find it who have an alert and no source.
const runbooks = "https://github.com/dnsguard/dnsguard/blob/main/docs/OPERATIONS.md"

// TestRules: each alert looks at what there is, says what is the matter, and is
// explained to operators under its name; and no other is.
func TestRules(t *testing.T) {
	known := documented(t)
	guide, err := os.ReadFile(filepath.Join("..", "docs", "OPERATIONS.md"))
	if err != nil {
		t.Fatal(err)
	}
	headings := anchors(string(guide))
	var names []string
	for _, r := range rules(t) {
		names = append(names, r.Alert)
		checkExpr(t, known, r.Expr)
		if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
			t.Errorf("%s: severity %q", r.Alert, r.Labels["severity"])
		}
		anchor := strings.ToLower(r.Alert)
		if want := runbooks + "#" + anchor; r.Annotations["runbook_url"] != want || len(r.Annotations) != 2 || r.Annotations["summary"] == "" {
			t.Errorf("%s: %v", r.Alert, r.Annotations)
		}
		if !headings[anchor] {
			t.Errorf("docs/OPERATIONS.md has no heading #%s", anchor)
		}
	}
	var explained []string
	for _, m := range regexp.MustCompile(`(?m)^#### (DNSGuard\w+)\n\n(\S)`).FindAllStringSubmatch(string(guide), -1) {
		explained = append(explained, m[1])
	}
	if diff := cmp.Diff(names, explained); diff != "" {
		t.Errorf("alerts, in their order (-rules.yaml +OPERATIONS.md)\n%s", diff)
	}
}

// TestPrometheusRule: the operator's object has the same groups, and the chart a copy of
// them.
func TestPrometheusRule(t *testing.T) {
	const head = `# Made of rules.yaml by the tests: go test . -update
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: dnsguard
  namespace: kube-system
  labels: {app.kubernetes.io/name: dnsguard}
spec:
`
	plain, err := os.ReadFile(filepath.Join("monitoring", "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	made(t, filepath.Join(chartDir, "rules.yaml"), string(plain))
	var out strings.Builder
	out.WriteString(head)
	for line := range strings.Lines(string(plain)) {
		if !strings.HasPrefix(line, "#") {
			out.WriteString(strings.TrimRight("  "+line, " "))
		}
	}
	made(t, filepath.Join("monitoring", "prometheusrule.yaml"), out.String())
	var a struct{ Spec any }
	var b any
	if err := yaml.Unmarshal([]byte(out.String()), &a); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(plain, &b); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(b, a.Spec); diff != "" {
		t.Errorf("(-rules.yaml +prometheusrule.yaml)\n%s", diff)
	}
}

// TestDashboard: each panel looks at what there is, has a place of its own, and a
// unit.
func TestDashboard(t *testing.T) {
	type panel struct {
		ID      int
		Type    string
		Title   string
		GridPos struct{ H, W, X, Y int }
		Targets []struct{ Expr, LegendFormat string }
	}
	var d struct {
		Title, UID string
		Templating struct {
			List []struct {
				Name       string
				Definition string
			}
		}
		Panels []panel
	}
	data, err := os.ReadFile(filepath.Join("monitoring", "dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	known := documented(t)
	used := map[string]bool{}
	ids := map[int]bool{}
	for i, p := range d.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d, %q", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, q := range d.Panels[:i] {
			a, b := p.GridPos, q.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("%q lies over %q", p.Title, q.Title)
			}
		}
		if p.GridPos.X+p.GridPos.W > 24 || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%q: %+v, %d expressions", p.Title, p.GridPos, len(p.Targets))
		}
		for _, target := range p.Targets {
			if !strings.Contains(target.Expr, `instance=~"$instance"`) {
				t.Errorf("%q does not heed the choice of nodes", p.Title)
			}
			expr := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(target.Expr)
			checkExpr(t, known, expr)
			for name := range known {
				if strings.Contains(expr, name+"{") || strings.Contains(expr, name+"_") || strings.HasSuffix(expr, name) || strings.Contains(expr, name+")") {
					used[name] = true
				}
			}
		}
	}
	for _, v := range d.Templating.List {
		if name := regexp.MustCompile(`^label_values\((\w+), instance\)$`).FindStringSubmatch(v.Definition); v.Name == "instance" && (name == nil || known[name[1]].kind == "") {
			t.Errorf("variable %s: %s", v.Name, v.Definition)
		}
	}
	t.Logf("%d of %d metrics are shown; not: %v", len(used), len(known), slices.DeleteFunc(slices.Sorted(maps.Keys(known)), func(n string) bool { return used[n] }))
}

// series are input for an alert, in promtool's notation: a sample a minute.
type series string

// TestAlerts plays each alert: it fires in time where there is a reason, and is
// silent where there is none.
func TestAlerts(t *testing.T) {
	const steady = "0+600x60" // 10 a second
	cases := map[string]struct {
		fires  []series
		labels string // of the alert that fires
		silent []series
	}{
		"DNSGuardAbsent": {
			fires: []series{`up{instance="a"} 1x60`}, labels: `{}`,
			silent: []series{`dnsguard_build_info{instance="a"} 1x60`},
		},
		"DNSGuardDown": {
			fires: []series{`up{instance="a"} 1x5 0x60`, `dnsguard_build_info{instance="a"} 1x5`}, labels: `{instance="a"}`,
			// Another program's target, and a process that was replaced.
			silent: []series{`up{instance="b"} 0x60`, `up{instance="a"} 1x20 0x3 1x40`, `dnsguard_build_info{instance="a"} 1x60`},
		},
		"DNSGuardNotReady": {
			fires: []series{`dnsguard_ready{instance="a"} 1x10 0x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_ready{instance="a"} 1x20 0x3 1x40`},
		},
		"DNSGuardConfigRefused": {
			fires: []series{`dnsguard_config_reloads_total{instance="a",result="failure"} 0x10 1x60`, `dnsguard_ready{instance="a"} 1x10 0x60`}, labels: `{instance="a",result="failure"}`,
			// A pod that starts in the place of the one that refused is no refusal.
			silent: []series{`dnsguard_config_reloads_total{instance="a",result="failure"} 0x10 1x60`, `dnsguard_ready{instance="a"} 1x60`, `dnsguard_ready{instance="a",uid="next"} 0x60`},
		},
		"DNSGuardRestartRequired": {
			fires: []series{`dnsguard_config_restart_required{instance="a"} 0x5 1x100`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_config_restart_required{instance="a"} 0x5 1x30 0x100`},
		},
		"DNSGuardNodeNameInDoubt": {
			fires: []series{`dnsguard_node_name_in_doubt{instance="a"} 1x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_node_name_in_doubt{instance="a"} 1x10 0x50`}, // a node's first pods
		},
		"DNSGuardConfigsDiffer": {
			fires: []series{`dnsguard_config_hash_info{instance="a",hash="1"} 1x60`, `dnsguard_config_hash_info{instance="b",hash="2"} 1x60`}, labels: `{}`,
			silent: []series{`dnsguard_config_hash_info{instance="a",hash="1"} 1x60`, `dnsguard_config_hash_info{instance="b",hash="1"} 1x60`},
		},
		"DNSGuardStuckReader": {
			fires: []series{`dnsguard_stuck_readers_total{instance="a"} 0x50 1x10`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_stuck_readers_total{instance="a"} 1x60`},
		},
		"DNSGuardClusterNewsOld": {
			fires: []series{`dnsguard_snapshot_age_seconds{instance="a"} 0+60x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_snapshot_age_seconds{instance="a"} 60x60`},
		},
		"DNSGuardServfail": {
			fires: []series{`dnsguard_responses_total{instance="a",rcode="NOERROR"} ` + steady, `dnsguard_responses_total{instance="a",rcode="SERVFAIL"} 0+60x60`}, labels: `{instance="a"}`,
			// One failing query a minute on a quiet node is no reason to wake anybody.
			silent: []series{`dnsguard_responses_total{instance="a",rcode="NOERROR"} 0+6x60`, `dnsguard_responses_total{instance="a",rcode="SERVFAIL"} 0+6x60`},
		},
		"DNSGuardSlow": {
			fires: []series{`dnsguard_query_duration_seconds_bucket{instance="a",le="1.8"} 0+590x60`, `dnsguard_query_duration_seconds_count{instance="a"} ` + steady}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_query_duration_seconds_bucket{instance="a",le="1.8"} ` + steady, `dnsguard_query_duration_seconds_count{instance="a"} ` + steady},
		},
		"DNSGuardOverload": {
			fires: []series{`dnsguard_shed_total{instance="a",reason="in_flight"} 0+6x60`, `dnsguard_shed_total{instance="a",reason="client"} 0x60`}, labels: `{instance="a",reason="in_flight"}`,
			silent: []series{`dnsguard_shed_total{instance="a",reason="in_flight"} 7x60`},
		},
		"DNSGuardSocketDrops": {
			fires: []series{`dnsguard_socket_drops_total{instance="a",address="10.96.0.10:53"} 0+6x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_socket_drops_total{instance="a",address="10.96.0.10:53"} 7x60`},
		},
		"DNSGuardStaleAnswers": {
			fires: []series{`dnsguard_cache_hits_total{instance="a",kind="stale"} 0+60x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_cache_hits_total{instance="a",kind="stale"} 0+1x60`, `dnsguard_cache_hits_total{instance="a",kind="positive"} ` + steady},
		},
		"DNSGuardCacheSmall": {
			fires: []series{`dnsguard_cache_bytes{instance="a"} 99x60`, `dnsguard_cache_limit_bytes{instance="a"} 100x60`, `dnsguard_cache_evictions_total{instance="a"} ` + steady}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_cache_bytes{instance="a"} 99x60`, `dnsguard_cache_limit_bytes{instance="a"} 100x60`, `dnsguard_cache_evictions_total{instance="a"} 0+6x60`},
		},
		"DNSGuardUpstreamFailing": {
			fires: []series{`dnsguard_upstream_failures_total{instance="a",upstream="u",reason="timeout"} 0+60x60`, `dnsguard_upstream_queries_total{instance="a",upstream="u",transport="udp"} ` + steady}, labels: `{instance="a",upstream="u"}`,
			silent: []series{`dnsguard_upstream_failures_total{instance="a",upstream="u",reason="timeout"} 0+6x60`, `dnsguard_upstream_queries_total{instance="a",upstream="u",transport="udp"} ` + steady},
		},
		"DNSGuardUpstreamDown": {
			fires: []series{`dnsguard_upstream_up{instance="a",upstream="u",transport="udp"} 0x60`}, labels: `{instance="a",upstream="u",transport="udp"}`,
			silent: []series{`dnsguard_upstream_up{instance="a",upstream="u",transport="udp"} 1x20 0x3 1x40`},
		},
		"DNSGuardWrongAnswers": {
			fires: []series{`dnsguard_upstream_wrong_answers_total{instance="a",upstream="u",reason="question"} 0+6x60`}, labels: `{instance="a",upstream="u"}`,
			silent: []series{`dnsguard_upstream_wrong_answers_total{instance="a",upstream="u",reason="id"} 0+6x60`},
		},
		"DNSGuardNotTaking": {
			fires: []series{`dnsguard_intercept_active{instance="a",address="10.96.0.10"} 0x60`}, labels: `{instance="a",address="10.96.0.10"}`,
			silent: []series{`dnsguard_intercept_active{instance="a",address="10.96.0.10"} 1x20 0x5 1x40`},
		},
		"DNSGuardWithdrawn": {
			fires: []series{`dnsguard_intercept_withdrawals_total{instance="a",reason="silent"} 0x50 1x10`}, labels: `{instance="a",reason="silent"}`,
			silent: []series{`dnsguard_intercept_withdrawals_total{instance="a",reason="leaving"} 0x50 1x10`},
		},
		"DNSGuardRulesFlap": {
			fires: []series{`dnsguard_intercept_repairs_total{instance="a"} 0+2x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_intercept_repairs_total{instance="a"} 0x50 3x10`},
		},
		"DNSGuardClientsBypassed": {
			fires: []series{`dnsguard_intercept_bypassed_clients{instance="a"} 2x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_intercept_bypassed_clients{instance="a"} 0x50 1x5 0x5`},
		},
		"DNSGuardNothingArrives": {
			fires: []series{`dnsguard_queries_total{instance="a",transport="udp"} 0+240x120`, `dnsguard_intercept_active{instance="a",address="10.96.0.10"} 1x120`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_queries_total{instance="a",transport="udp"} 0+600x120`, `dnsguard_intercept_active{instance="a",address="10.96.0.10"} 1x120`},
		},
		"DNSGuardPurgeSlow": {
			fires: []series{`dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="0.1"} 0x60`, `dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="1"} 0+1x60`, `dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="+Inf"} 0+1x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="0.1"} 0+1x60`, `dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="1"} 0+1x60`, `dnsguard_guard_news_to_purge_seconds_bucket{instance="a",le="+Inf"} 0+1x60`},
		},
		"DNSGuardKubeProxyLags": {
			fires: []series{`dnsguard_guard_recreated_total{instance="a"} 0+2x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_guard_recreated_total{instance="a"} 0x50 5x10`},
		},
		"DNSGuardStaleFlows": {
			fires: []series{`dnsguard_guard_flows{instance="a",verdict="stale"} 3x60`}, labels: `{instance="a",verdict="stale"}`,
			silent: []series{`dnsguard_guard_flows{instance="a",verdict="stale"} 3x3 0x1 3x8 0x1 3x8 0x1 3x8`, `dnsguard_guard_flows{instance="a",verdict="live"} 3x36`},
		},
		"DNSGuardGuardErrors": {
			fires: []series{`dnsguard_guard_errors_total{instance="a",op="delete"} 0+1x60`}, labels: `{instance="a",op="delete"}`,
			silent: []series{`dnsguard_guard_errors_total{instance="a",op="delete"} 0x40 1x20`},
		},
		"DNSGuardGuardIdle": {
			fires: []series{`dnsguard_guard_state_info{instance="a",state="ipvs"} 1x120`}, labels: `{instance="a",state="ipvs"}`,
			silent: []series{`dnsguard_guard_state_info{instance="a",state="guarding"} 1x120`},
		},
		"DNSGuardConntrackFull": {
			fires: []series{`dnsguard_conntrack_entries{instance="a"} 95x60`, `dnsguard_conntrack_limit{instance="a"} 100x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_conntrack_entries{instance="a"} 95x60`, `dnsguard_conntrack_limit{instance="a"} 0x60`},
		},
		"DNSGuardConntrackEvicts": {
			fires: []series{`dnsguard_conntrack_early_drop_total{instance="a"} 0+6x60`}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_conntrack_early_drop_total{instance="a"} 1000x60`},
		},
		"DNSGuardInsertFailed": {
			fires: []series{`dnsguard_conntrack_insert_failed_total{instance="a"} ` + steady}, labels: `{instance="a"}`,
			silent: []series{`dnsguard_conntrack_insert_failed_total{instance="a"} 0+6x60`},
		},
	}
	for _, r := range rules(t) {
		t.Run(r.Alert, func(t *testing.T) {
			c, ok := cases[r.Alert]
			if !ok {
				t.Fatal("is never played")
			}
			delete(cases, r.Alert)
			want, err := promparser.NewParser(promparser.Options{}).ParseMetric(c.labels)
			if err != nil {
				t.Fatal(err)
			}
			if got := firing(t, r, c.fires); !slices.Equal(got, []string{want.String()}) {
				t.Errorf("fires for %v, want %s", got, want)
			}
			if got := firing(t, r, c.silent); len(got) > 0 {
				t.Errorf("fires for %v without a reason", got)
			}
			// In an update two pods answer for a node, and Prometheus tells them apart.
			if got := firing(t, r, twoPods(t, c.silent)); len(got) > 0 {
				t.Errorf("with two pods: fires for %v without a reason", got)
			}
			if got := firing(t, r, twoPods(t, c.fires)); len(got) == 0 {
				t.Error("with two pods: does not fire")
			}
		})
	}
	for name := range cases {
		t.Errorf("there is no alert %s", name)
	}
}

// twoPods gives each series to two pods of its node.
func twoPods(t *testing.T, input []series) []series {
	t.Helper()
	var out []series
	for _, s := range input {
		name, rest, ok := strings.Cut(string(s), "{")
		if !ok {
			t.Fatalf("no labels: %s", s)
		}
		out = append(out, series(name+`{pod="old",`+rest), series(name+`{pod="new",`+rest))
	}
	return out
}

// firing plays an alert over the series, and returns the labels for which it fires at
// any time: the expression has to hold at each look, a minute apart, for as long
// as the rule says.
func firing(t *testing.T, r rulefmt.Rule, input []series) []string {
	t.Helper()
	parse := promparser.NewParser(promparser.Options{})
	var data []storage.Series
	end := time.Unix(0, 0)
	for _, text := range input {
		l, values, err := parse.ParseSeriesDesc(string(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		var samples []chunks.Sample
		for i, v := range values {
			at := time.Unix(int64(i)*60, 0)
			samples = append(samples, sample{at.UnixMilli(), v.Value})
			if at.After(end) {
				end = at
			}
		}
		data = append(data, storage.NewListSeries(l, samples))
	}
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: slog.New(slog.DiscardHandler), MaxSamples: 1e6, Timeout: time.Minute, Parser: parse,
	})
	q, err := engine.NewRangeQuery(t.Context(), queryable(data), nil, r.Expr, time.Unix(0, 0), end, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	matrix, err := q.Exec(t.Context()).Matrix()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, s := range matrix {
		held, last := time.Duration(0), int64(-1)
		for _, p := range s.Floats {
			if last < 0 || p.T-last > time.Minute.Milliseconds() {
				held = 0
			} else {
				held += time.Duration(p.T-last) * time.Millisecond
			}
			last = p.T
			if held >= time.Duration(r.For) {
				out = append(out, s.Metric.DropReserved(func(n string) bool { return n == model.MetricNameLabel }).String())
				break
			}
		}
	}
	slices.Sort(out)
	return out
}

// sample is a value at a time, in milliseconds.
type sample struct {
	t int64
	f float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.f }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }

// queryable is a few series as Prometheus's storage.
type queryable []storage.Series

func (q queryable) Querier(_, _ int64) (storage.Querier, error) { return querier{q}, nil }

type querier struct{ all []storage.Series }

func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	set := &seriesSet{next: -1}
	for _, s := range q.all {
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(s.Labels().Get(m.Name)) }) {
			set.all = append(set.all, s)
		}
	}
	return set
}

func (q querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, fmt.Errorf("not asked for")
}

func (q querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, fmt.Errorf("not asked for")
}

func (q querier) Close() error { return nil }

type seriesSet struct {
	all  []storage.Series
	next int
}

func (s *seriesSet) Next() bool                        { s.next++; return s.next < len(s.all) }
func (s *seriesSet) At() storage.Series                { return s.all[s.next] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }
