package resolver

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// waitedForwarder notes how long each question's client had waited.
type waitedForwarder struct {
	fakeForwarder
	waited chan time.Duration
}

func (f *waitedForwarder) Exchange(ctx context.Context, q upstream.Question) (upstream.Answer, error) {
	f.waited <- q.Waited
	return f.fakeForwarder.Exchange(ctx, q)
}

// TestTimeBeforeTheFlight: a client's time runs from its query on, not from the
// moment at which a processor was free to work on it.
func TestTimeBeforeTheFlight(t *testing.T) {
	const before = 300 * time.Millisecond
	// ask asks as of a while ago.
	ask := func(t *testing.T, c *client, name string) (took time.Duration) {
		t.Helper()
		b, err := query(name, dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, waits := c.r.answer(c.s, b, false, &c.src, c.r.cache.Now()-before, nil); waits {
			<-c.answers
		}
		return time.Since(start)
	}
	synctest.Test(t, func(t *testing.T) {
		var delay atomic.Int64
		z := zone{"example.com.": "A", "a.b.": "A"}
		f := &waitedForwarder{waited: make(chan time.Duration, 100)}
		f.answer = func(ctx context.Context, m *dns.Msg) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Duration(delay.Load())):
			}
			return z.answer(t)(ctx, m)
		}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		c := newClient(t, r, "10.0.0.1", UDP)

		ask(t, c, "example.com.")
		if waited := <-f.waited; waited != before || len(f.waited) > 0 {
			t.Errorf("the forwarder is told that the client has waited %v, want %v, once", waited, before)
		}

		time.Sleep(time.Hour)
		delay.Store(int64(1400 * time.Millisecond))
		if took := ask(t, c, "example.com."); took != 1200*time.Millisecond-before {
			t.Errorf("the stale answer came %v after a start that was %v late, want 1.2 s in all", took, before)
		}

		delay.Store(int64(700 * time.Millisecond))
		if took := ask(t, c, "x.y.shop.svc.cluster.local."); took != 1500*time.Millisecond-before {
			t.Errorf("the walk's end came %v after a start that was %v late, want 1.5 s in all", took, before)
		}
	})
}
