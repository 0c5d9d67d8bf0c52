package upstream

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

func TestConfigProblems(t *testing.T) {
	one := []Server{{Addr: addr(1)}}
	for name, tt := range map[string]struct {
		config Config
		want   string // in the error
	}{
		"no routes":        {Config{}, "no routes"},
		"no zones":         {Config{Routes: []Route{{Servers: one}}}, "route 0: no zones"},
		"no servers":       {Config{Routes: []Route{{Zones: []string{"."}}}}, "route 0: no nameservers"},
		"bad zone":         {Config{Routes: []Route{{Zones: []string{"a..b"}, Servers: one}}}, `zone "a..b"`},
		"zone twice":       {Config{Routes: []Route{{Zones: []string{"A.b."}, Servers: one}, {Zones: []string{"a.B"}, Servers: one}}}, "two routes"},
		"no port":          {Config{Routes: []Route{{Zones: []string{"."}, Servers: []Server{{Addr: netip.MustParseAddrPort("192.0.2.1:0")}}}}}, "no port"},
		"neither":          {Config{Routes: []Route{{Zones: []string{"."}, Servers: []Server{{}}}}}, "want exactly one"},
		"both":             {Config{Routes: []Route{{Zones: []string{"."}, Servers: []Server{{Addr: addr(1), File: "x"}}}}}, "want exactly one"},
		"protocol":         {Config{Routes: []Route{{Zones: []string{"."}, Servers: one, Protocol: 3}}}, "protocol 3"},
		"negative timeout": {Config{Routes: []Route{{Zones: []string{"."}, Servers: one}}, Timeouts: Timeouts{Retry: -1}}, "negative"},
		"budget above 100": {Config{Routes: []Route{{Zones: []string{"."}, Servers: one}}, Budget: Budget{Hedge: 101}}, "not a percentage"},
		"budget below 0":   {Config{Routes: []Route{{Zones: []string{"."}, Servers: one}}, Budget: Budget{Retry: -1}}, "not a percentage"},
		"ourselves": {Config{
			Routes: []Route{{Zones: []string{"."}, Servers: []Server{{Addr: addr(2)}, {Addr: addr(1)}}}},
			Self:   func(a netip.AddrPort) bool { return a == addr(1) },
		}, "server 192.0.2.1:53: an address of our own"},
		"all at once": {Config{Routes: []Route{{Zones: []string{"."}}}, Timeouts: Timeouts{Total: -1}}, "negative\nroute 0"},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := New(tt.config)
			if err == nil {
				f.Close()
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q, want %q in it", err, tt.want)
			}
		})
	}
}

func TestLongestZone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, healthy(0), healthy(0), healthy(0))
		f := n.forwarder(Config{Routes: []Route{
			{Zones: []string{"."}, Servers: []Server{{Addr: addr(1)}}},
			{Zones: []string{"cluster.local", "10.in-addr.arpa."}, Servers: []Server{{Addr: addr(2)}}},
			{Zones: []string{"Special.Cluster.Local."}, Servers: []Server{{Addr: addr(3)}}},
		}})
		for name, want := range map[string]int{
			".": 1, "local.": 1, "cluster.local.": 2, "a.cluster.local.": 2, "a.b.c.cluster.local.": 2,
			"xcluster.local.": 1, "cluster.local.example.": 1, "1.0.0.10.in-addr.arpa.": 2,
			"special.cluster.local.": 3, "x.special.cluster.local.": 3, "xspecial.cluster.local.": 2,
		} {
			ans, err := f.Exchange(t.Context(), query(name))
			if err != nil || lastOctet(ans.Server) != want {
				t.Errorf("%s: answered by %v, error %v, want server %d", name, ans.Server, err, want)
			}
		}
	})
}

// The hedge follows the round trips, within its bounds.
func TestHedgeDelay(t *testing.T) {
	for name, tt := range map[string]struct {
		rtts []time.Duration
		want time.Duration
	}{
		"nothing known": {nil, 250 * ms},
		"fast":          {[]time.Duration{ms, ms, ms}, 50 * ms},
		"one sample":    {[]time.Duration{30 * ms}, 90 * ms},
		"slow":          {[]time.Duration{200 * ms, 200 * ms}, 250 * ms},
		"steady":        {repeat(50, 40*ms), 120 * ms},
		"very mixed: three means would hedge each slow one": {repeat(20, ms, ms, ms, ms, 100*ms), 191 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			var p path
			for _, rtt := range tt.rtts {
				p.sample(rtt)
			}
			if got := p.hedgeDelay().Round(ms); got != tt.want {
				t.Errorf("hedge after %v, want %v (smoothed %v, deviation %v)", got, tt.want, p.srtt, p.rttvar)
			}
		})
	}
}

func repeat(n int, rtts ...time.Duration) []time.Duration {
	var all []time.Duration
	for range n {
		all = append(all, rtts...)
	}
	return all
}

func TestFixedHedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNet(t, on(blackHole, healthy(0)))
		f := n.forwarder(Config{Budget: usual, Timeouts: Timeouts{Hedge: 77 * ms}})
		start := time.Now()
		if _, err := f.Exchange(t.Context(), query("www.example.")); err != nil || time.Since(start) != 77*ms {
			t.Errorf("error %v after %v, want an answer after 77 ms", err, time.Since(start))
		}
	})
}

func TestBucket(t *testing.T) {
	spendAll := func(b *budget, k Kind) (n int) {
		for b.spend(k, true) {
			n++
		}
		return n
	}
	earn := func(b *budget, n int) {
		for range n {
			b.earn()
		}
	}
	t.Run("allowance is lent", func(t *testing.T) {
		b := newBudget(usual)
		if n := spendAll(b, Retry); n != 10 {
			t.Errorf("allowed %d at the start, want 10", n)
		}
		if earn(b, 130); spendAll(b, Retry) != 0 {
			t.Error("allowed more before the allowance is paid back")
		}
		if earn(b, 100); spendAll(b, Retry) != 10 {
			t.Error("not allowed 10 for the next 100 questions")
		}
	})
	t.Run("kinds", func(t *testing.T) {
		b := newBudget(usual)
		spendAll(b, Retry)
		earn(b, 1000)
		spendAll(b, Retry)
		earn(b, 100)
		if h, r := spendAll(b, Hedge), spendAll(b, Retry); h != 10 || r != 0 {
			t.Errorf("%d hedges and %d retries, want 10 (saved) and none", h, r)
		}
		if got := b.refused(); got[Hedge] != 1 || got[Retry] != 3 {
			t.Errorf("refused %v", got)
		}
	})
	t.Run("savings are bounded", func(t *testing.T) {
		b := newBudget(usual)
		earn(b, 100000)
		if n := spendAll(b, Retry); n != 47 {
			t.Errorf("allowed %d at once, want 47 of 50: three are kept for a confirmation", n)
		}
	})
	t.Run("none", func(t *testing.T) {
		b := newBudget(Budget{})
		earn(b, 1000)
		if b.spend(Hedge, true) || b.spend(Retry, true) {
			t.Error("a budget of nothing allows something")
		}
	})
	t.Run("a confirmation", func(t *testing.T) {
		b := newBudget(usual)
		spendAll(b, Retry)
		if !b.confirm(3, false) {
			t.Error("what is kept for a confirmation is not to be had")
		}
		if b.confirm(3, false) {
			t.Error("allowed a second one")
		}
		b.refund(2)
		if b.confirm(3, false) || !b.confirm(3, true) { // one is owed now
			t.Error("allowed what is not there, or not allowed what must be")
		}
		earn(b, 130) // pays back what was lent
		if earn(b, 39); b.confirm(3, false) || spendAll(b, Retry) != 0 {
			t.Error("allowed more before what is owed is paid back")
		}
		if earn(b, 10); spendAll(b, Retry) != 0 || !b.confirm(3, false) {
			t.Error("want the next confirmation before anything else")
		}
	})
	t.Run("fruitless", func(t *testing.T) {
		if newBudget(usual).spend(Retry, false) {
			t.Error("allowed although it cannot help")
		}
	})
	t.Run("many at once", func(t *testing.T) {
		b := newBudget(usual)
		b.spendMany(func(most int) int {
			if most != 10 {
				t.Errorf("allowed %d, want 10", most)
			}
			return 7
		})
		if n := spendAll(b, Retry); n != 3 {
			t.Errorf("allowed %d more, want 3", n)
		}
		b.spendMany(func(int) int {
			t.Error("asked although nothing is left")
			return 0
		})
	})
}

func TestShare(t *testing.T) {
	var s share
	n := 0
	for ; s <= mostly; n++ {
		s.add(true)
	}
	if n < 30 || n > 60 {
		t.Errorf("most fail after %d failures in a row", n)
	}
	for range 1000 {
		s.add(true)
	}
	if s > whole {
		t.Errorf("share %d of %d", s, whole)
	}
	for range 1000 {
		s.add(false)
	}
	if s != 0 {
		t.Errorf("share %d after nothing but success", s)
	}
	for range 1000 {
		s.add(true)
		s.add(false)
		if s > mostly {
			t.Fatal("half is most")
		}
	}
}

func TestError(t *testing.T) {
	cause := &Error{Reason: Network, Server: addr(1), Err: syscall.ECONNREFUSED}
	for name, tt := range map[string]struct {
		err  *Error
		text string
		code uint16
		ede  string
	}{
		"timeout":    {&Error{Reason: Timeout, Server: addr(1)}, "upstream 192.0.2.1:53: timeout", dnswire.EDENoReachable, "upstream 192.0.2.1:53: timeout"},
		"network":    {cause, "upstream 192.0.2.1:53: network: connection refused", dnswire.EDENetworkError, "upstream 192.0.2.1:53: network"},
		"budget":     {&Error{Reason: OverBudget, Server: addr(1)}, "upstream 192.0.2.1:53: over budget", dnswire.EDENoReachable, "upstream 192.0.2.1:53: over budget"},
		"no servers": {&Error{Reason: NoServers}, "upstream: no servers", dnswire.EDENoReachable, "upstream: no servers"},
		"malformed":  {&Error{Reason: Malformed, Server: addr(1)}, "upstream 192.0.2.1:53: malformed", dnswire.EDEInvalidData, "upstream 192.0.2.1:53: malformed"},
		"truncated":  {&Error{Reason: Truncated, Server: addr(1)}, "upstream 192.0.2.1:53: truncated", dnswire.EDEInvalidData, "upstream 192.0.2.1:53: truncated"},
		"canceled":   {&Error{Reason: Canceled, Err: context.Canceled}, "upstream: canceled: context canceled", dnswire.EDEOther, "upstream: canceled"},
		"closed":     {&Error{Reason: Closed}, "upstream: closed", dnswire.EDENotReady, "upstream: closed"},
		"local":      {&Error{Reason: Local, Err: syscall.EMFILE}, "upstream: not sent, trouble on this node: too many open files", dnswire.EDENotReady, "upstream: not sent, trouble on this node"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.err.Error(); got != tt.text {
				t.Errorf("text %q, want %q", got, tt.text)
			}
			code, text := tt.err.EDE()
			if code != tt.code || text != tt.ede {
				t.Errorf("EDE %d %q, want %d %q", code, text, tt.code, tt.ede)
			}
			if !errors.Is(tt.err, tt.err.Err) && tt.err.Err != nil {
				t.Error("cause is hidden")
			}
		})
	}
}

func TestNames(t *testing.T) {
	var got []string
	for r := range numReasons {
		got = append(got, r.String())
	}
	for k := range numKinds {
		got = append(got, k.String())
	}
	for tr := range numTransports {
		got = append(got, tr.String())
	}
	for w := range numWrongs {
		got = append(got, w.String())
	}
	want := []string{
		"timeout", "network", "over_budget", "no_servers", "malformed", "truncated", "canceled", "closed", "local", "rcode",
		"hedge", "retry", "udp", "tcp", "id", "question", "message",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
