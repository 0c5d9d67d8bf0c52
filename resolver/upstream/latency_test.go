package upstream

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// A server that turns from 1 ms to nearly as long as clients wait, as under load, is
// slow and not dead: it stays up, and nothing that the public server after it denies
// of internal names is believed, let alone cached.
func TestTurnsSlow(t *testing.T) {
	// (At 900 ms it was believed dead once: 450 of 2,000 denied.)
	for _, slow := range []time.Duration{300 * ms, 600 * ms, 900 * ms, 1200 * ms} {
		for _, interval := range []time.Duration{2 * ms, 20 * ms, 200 * ms, time.Second} {
			t.Run(fmt.Sprintf("%v, one every %v", slow, interval), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNet(t, healthy(ms), denying)
					config, health := watched(Config{Budget: usual})
					f := n.forwarder(config)
					load(t, f, 200, 10*ms)
					n.become(addr(1), healthy(slow))
					const questions = 2000
					var mu sync.Mutex
					var wg sync.WaitGroup
					answered, denied := 0, 0
					for i := range questions {
						wg.Go(func() {
							ans, err := f.Exchange(t.Context(), query(fmt.Sprintf("db%d.corp.example.", i)))
							mu.Lock()
							defer mu.Unlock()
							switch {
							case err != nil:
							case ans.Response.Rcode == dns.RcodeNameError:
								denied++
							default:
								answered++
							}
						})
						time.Sleep(interval)
					}
					wg.Wait()
					t.Logf("%d of %d answered, %d denied, health %v", answered, questions, denied, health())
					if denied > 0 || answered < questions {
						t.Errorf("%d of %d answered, %d denied", answered, questions, denied)
					}
					if got := health(); len(got) > 0 {
						t.Errorf("health %v, want no change", got)
					}
				})
			})
		}
	}
}
