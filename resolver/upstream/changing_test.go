package upstream

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// TestServerChangesItsWays: a server that always has the answer, soon or late, but may
// want to be asked again for it, without OPT or over TCP, and changes in that, is the one
// whose answer counts. The next server knows nothing of its names.
func TestServerChangesItsWays(t *testing.T) {
	const most = 400 * ms // three of these, at worst, are an answer in time
	truncated := func(q *fakeQuery) *dns.Msg {
		m := q.rcode(dns.RcodeSuccess)
		m.Truncated = true
		return m
	}
	refusesOPT := func(rcode int) func(*fakeQuery, *rand.Rand) *dns.Msg {
		return func(q *fakeQuery, _ *rand.Rand) *dns.Msg {
			if q.IsEdns0() == nil {
				return q.good()
			}
			m := q.rcode(rcode)
			m.SetEdns0(1232, false)
			return m
		}
	}
	ways := []func(*fakeQuery, *rand.Rand) *dns.Msg{
		func(q *fakeQuery, _ *rand.Rand) *dns.Msg { return q.good() },
		refusesOPT(dns.RcodeFormatError),
		refusesOPT(dns.RcodeNotImplemented),
		refusesOPT(dns.RcodeBadVers),
		func(q *fakeQuery, dice *rand.Rand) *dns.Msg {
			if q.tcp() || dice.IntN(2) == 0 {
				return q.good()
			}
			return truncated(q)
		},
		func(q *fakeQuery, _ *rand.Rand) *dns.Msg {
			switch {
			case q.IsEdns0() != nil:
				return q.rcode(dns.RcodeFormatError)
			case q.tcp():
				return q.good()
			}
			return truncated(q)
		},
	}
	for seed := range uint64(12) {
		rate := []int{1, 10, 100}[seed%3] // questions a second
		t.Run(fmt.Sprintf("seed %d, %d a second", seed, rate), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dice, serverDice := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
				n := newFakeNet(t, healthy(ms), denying)
				config, health := watched(Config{Budget: usual})
				f := n.forwarder(config)
				var asking sync.WaitGroup
				asked := 0
				for range 20 {
					way := ways[dice.IntN(len(ways))]
					n.become(addr(1), func(q *fakeQuery) {
						after := time.Duration(serverDice.IntN(5)) * ms
						if serverDice.IntN(3) == 0 {
							after = time.Duration(serverDice.IntN(int(most/ms))) * ms
						}
						q.reply(after, way(q, serverDice))
					})
					for range 1 + dice.IntN(4*rate) {
						q := query(fmt.Sprintf("n%d.corp.", asked%50))
						q.DO = asked%7 == 0
						asked++
						asking.Go(func() {
							ans, err := f.Exchange(t.Context(), q)
							if err != nil {
								t.Error(err)
								return
							}
							if ans.Server != addr(1) || ans.Response.Rcode != 0 {
								t.Errorf("rcode %d from %v", ans.Response.Rcode, ans.Server)
							}
						})
						time.Sleep(time.Second / time.Duration(rate))
					}
				}
				asking.Wait()
				if len(health()) > 0 {
					t.Errorf("health %v", health())
				}
			})
		})
	}
}
