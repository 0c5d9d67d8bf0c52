package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dnsguard/dnsguard/internal/config"
)

// TestMissingNodeDomains: what pods search and the configuration lacks is told,
// once.
func TestMissingNodeDomains(t *testing.T) {
	for name, tt := range map[string]struct {
		file   string
		change func(*config.Config)
		want   string
	}{
		"none":                         {file: "nameserver 10.0.0.2\n"},
		"one":                          {file: "nameserver 10.0.0.2\nsearch corp.example\n", want: "corp.example"},
		"several, and the root":        {file: "search Corp.Example. . lab.example\noptions ndots:1\n", want: "corp.example lab.example"},
		"the root alone":               {file: "search .\n"},
		"the last line counts":         {file: "search a.example\nsearch b.example\n", want: "b.example"},
		"comments":                     {file: "# search a.example\n; search b.example\n"},
		"those of a ClusterFirst pod":  {file: "search kube-system.svc.cluster.local svc.cluster.local cluster.local corp.example\n", want: "corp.example"},
		"configured":                   {file: "search corp.example lab.example\n", change: func(c *config.Config) { c.Search.Domains = []string{"Corp.Example."} }, want: "lab.example"},
		"all configured":               {file: "search corp.example\n", change: func(c *config.Config) { c.Search.Domains = []string{"corp.example"} }},
		"walks are nobody's":           {file: "search corp.example\n", change: func(c *config.Config) { c.Search.Collapse = false }},
		"without Kubernetes":           {file: "search corp.example\n", change: func(c *config.Config) { c.Kubernetes.Source = config.SourceNone }},
		"a file that cannot be opened": {},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "resolv.conf")
			if tt.file != "" {
				if err := os.WriteFile(file, []byte(tt.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			cfg := config.Default()
			cfg.Kubernetes.Source = config.SourceAPI
			if tt.change != nil {
				tt.change(cfg)
			}
			if got := strings.Join(missingNodeDomains(cfg, file), " "); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
			var out strings.Builder
			d := &daemon{log: slog.New(slog.NewTextHandler(&out, nil)), conditions: newConditions(nil)}
			for range 3 {
				d.warnOfNodeDomains(cfg, file)
			}
			want := min(1, len(tt.want))
			if n := strings.Count(out.String(), "level=WARN"); n != want {
				t.Errorf("logged %d times, want %d:\n%s", n, want, out.String())
			}
			if _, warnings := d.conditions.get(); len(warnings) != want {
				t.Errorf("warnings %q", warnings)
			}
			// What is put right is taken back.
			cfg.Search.Domains = strings.Fields(tt.want)
			cfg.Search.Domains = append(cfg.Search.Domains, searchLine(tt.file)...)
			d.warnOfNodeDomains(cfg, file)
			if _, warnings := d.conditions.get(); slices.ContainsFunc(warnings, func(w string) bool { return strings.HasPrefix(w, "search.domains") }) {
				t.Errorf("still warns: %q", warnings)
			}
		})
	}
}
