package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// apiAway is how long the API server is away with dnsguard there; then it is away
// for a new one.
const apiAway = 8 * time.Second

// TestAPIDown: the API server goes away under load, and a CoreDNS dies that nobody
// can be told of: kube-proxy leads half of the flows to it from then on. Pods that
// ask through dnsguard do not notice. Then dnsguard is killed, and a new one serves
// without the API server, not ready, with the IPv4 address that its pod's
// environment names. When the API server is back, so is everything.
func TestAPIDown(t *testing.T) {
	labtest.RequireSpeed(t)
	w := newWorld(t, "iptables")
	g := w.guard(w.nodes[0])
	streams := append(w.misses(w.client, apiAway), w.streams(apiAway, patience)...)
	wait := w.drive(streams)
	start := time.Now()
	w.KillAPI()
	after(start, 2*time.Second)
	w.must(w.dns[1].Die())
	lost, sent := wait()
	t.Logf("API server away for %v, a CoreDNS dead for %v of it: %d of %d lost", apiAway, apiAway-2*time.Second, lost, sent)
	hits, misses, asked := 0, 0, 0
	for _, s := range streams {
		if s.load.Unique {
			misses, asked = misses+s.result.Failed(), asked+s.result.Sent
		} else {
			hits += s.result.Failed()
		}
	}
	if hits > 0 {
		t.Errorf("%d queries lost for names that were known", hits)
	}
	// Half of all new sockets lead nowhere, and a tenth of the questions may be
	// asked again (budget.retry).
	if misses > asked/10 {
		t.Errorf("%d queries lost that had to go to CoreDNS; %s", misses, w.figures(g))
	}

	g.Kill()
	young, err := w.nodes[0].LaunchGuard()
	w.must(err)
	serves := w.await("the new dnsguard serves without the API server", func(ctx context.Context) error {
		if active, err := young.Metric(ctx, "dnsguard_intercept_active", `address="10.96.0.10:53"`); err != nil || active != 1 {
			return fmt.Errorf("active %v, %w", active, err)
		}
		return nil
	})
	page, err := young.Page(w.soon(), "/readyz")
	w.must(err)
	if strings.HasPrefix(page, "ok") {
		t.Error("a dnsguard that has not heard the cluster calls itself ready")
	}
	// Three questions by new ports, at most, and each may lead to the dead CoreDNS.
	w.await("an answer", func(context.Context) error {
		_, err := w.ask(w.client.Namespace, "udp", kubelab.DNS4, apiName, 1)
		return err
	})
	w.must(w.StartAPI(w.soon()))
	back := time.Now()
	w.must(young.AwaitReady(w.soon()))
	ready := time.Since(back)
	t.Logf("dnsguard started without the API server: serves after %v; ready %v after it is back", serves.Round(time.Millisecond), ready.Round(time.Millisecond))
	for _, server := range []netip.AddrPort{kubelab.DNS4, kubelab.DNS6} {
		if _, err := w.ask(w.client.Namespace, "udp", server, apiName, 1); err != nil {
			t.Error(err)
		}
	}
}
