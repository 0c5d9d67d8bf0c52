package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// apiAway is how long the API server is away: longer than a watch of client-go
// waits before it is asked for again, and than the guard's probes.
const apiAway = 12 * time.Second

// TestAPIDown: the API server goes away for a while, under load. Nothing is lost,
// nothing is forgotten: a CoreDNS that dies meanwhile does not stop a pod that asks
// through dnsguard; a dnsguard that starts meanwhile serves; and what changed is
// known soon after the API server is back.
func TestAPIDown(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	g := w.guard(w.nodes[0])
	wait := w.drive(append(w.misses(apiAway), w.streams(apiAway)...))
	start := time.Now()
	w.KillAPI()
	after(start, 2*time.Second)
	w.must(w.dns[1].Die())
	g.Kill()
	young, err := w.nodes[0].LaunchGuard()
	w.must(err)
	w.await("the new dnsguard takes queries although it cannot hear the cluster", func(ctx context.Context) error {
		taken, err := young.Metric(ctx, "dnsguard_queries_total")
		if err == nil && taken < 200 { // its own probes are some
			err = fmt.Errorf("%v queries", taken)
		}
		return err
	})
	served := time.Since(start.Add(2 * time.Second))
	page, err := young.Page(w.soon(), "/readyz")
	w.must(err)
	if strings.HasPrefix(page, "ok") {
		t.Error("a dnsguard that has not heard the cluster calls itself ready")
	}
	lost, sent := wait()
	after(start, apiAway)
	w.must(w.StartAPI(w.soon()))
	back := time.Now()
	w.must(young.AwaitReady(w.soon()))
	readyAfter := time.Since(back)
	w.must(w.dns[1].Delete(w.soon(), 0))
	w.restore()
	t.Logf("API server away for %v: a CoreDNS and dnsguard killed meanwhile, the new dnsguard serves after %v: %d of %d lost; ready %v after the API server", apiAway, served.Round(100*time.Millisecond), lost, sent, readyAfter.Round(100*time.Millisecond))
	// What the killed process had in its hands, as in TestOutage, and what waited
	// for the dead CoreDNS when kube-proxy's path was all there was.
	if lost > sent/20 {
		t.Errorf("%d of %d queries lost", lost, sent)
	}
	if _, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1); err != nil {
		t.Error(err)
	}
}
