package deploy

import (
	"strings"
	"testing"
)

// TestChartExtraArgs: what probes, ports, RBAC rules and the update strategy are made of
// is set where the chart sees it.
func TestChartExtraArgs(t *testing.T) {
	for _, arg := range []string{
		"--config=/x", "--control=/run/x.sock", "--http=:1", "--kubernetes.source=none", "--kubernetes.dnsService=a/b",
		"--intercept.mode=none", "--guard.enabled=false", "--guard.services=a/b", "--control",
	} {
		_, err := template(t, "kube-system", `extraArgs: ['`+arg+`']`)
		if err == nil || !strings.Contains(err.Error(), "extraArgs: "+arg+" belongs into config") {
			t.Errorf("%s: %v", arg, err)
		}
	}
	for _, arg := range []string{"--cache.size=64Mi", "--listen=127.0.0.1", "--guard.dryRun=true"} {
		if _, err := template(t, "kube-system", `extraArgs: ['`+arg+`']`); err != nil {
			t.Errorf("%s: %v", arg, err)
		}
	}
}
