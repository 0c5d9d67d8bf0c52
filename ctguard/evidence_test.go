package ctguard_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

// TestEvidence: an endpoint is ready by its EndpointSlice, and silent.
func TestEvidence(t *testing.T) {
	for _, tt := range []struct {
		name     string
		pods     []string
		heard    bool // it has answered a probe before
		dead     bool // and does not now
		evidence bool
		flow     func(second int) ctguard.Flow // the flow to it
		want     []string
		probes   bool // beyond the first
	}{
		{
			name: "dead, old flow", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: asks(100, 0), want: []string{"1 unanswered"}, probes: true,
		},
		{
			name: "dead, flow that never had a reply", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: neverReplied, want: []string{"1 unanswered"}, probes: true,
		},
		{
			name: "no evidence wanted", pods: []string{podA, podB}, heard: true, dead: true, evidence: false,
			flow: asks(100, 0),
		},
		{
			name: "the last one", pods: []string{podA}, heard: true, dead: true, evidence: true,
			flow: asks(100, 0), probes: true,
		},
		{
			name: "answers probes", pods: []string{podA, podB}, heard: true, dead: false, evidence: true,
			flow: asks(100, 0), probes: true,
		},
		{
			name: "never heard", pods: []string{podA, podB}, heard: false, dead: true, evidence: true,
			flow: asks(100, 0), probes: true, // in search of a first answer
		},
		{
			name: "old losses", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: func(int) ctguard.Flow { return counted(1000, 900) },
		},
		{
			name: "slow, but replies come", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: asks(100, 1),
		},
		{
			name: "all is well", pods: []string{podA, podB}, heard: true, dead: true, evidence: true,
			flow: func(s int) ctguard.Flow { return counted(uint64(100+s), uint64(100+s)) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProber(podB)
				p.set(podA, tt.heard)
				l := start(t, &ctguardtest.Table{}, func(c *ctguard.Config) {
					c.Prober, c.Evidence, c.Events = p, tt.evidence, nil
				})
				l.guard.Update(kubeDNS(tt.pods...))
				time.Sleep(67 * time.Second)
				before := p.probes(podA)
				p.set(podA, !tt.dead)
				purged := time.Duration(0)
				for s := range 20 {
					if purged == 0 {
						l.table.Set(tt.flow(s))
					}
					time.Sleep(time.Second)
					if l.guard.Stats().Deleted[ctguard.Unanswered] > 0 && purged == 0 {
						purged = time.Duration(s+1) * time.Second
					}
				}
				l.wantPurges(tt.want...)
				if len(tt.want) > 0 && purged > 12*time.Second {
					t.Errorf("purged after %v", purged)
				}
				if got := p.probes(podA) > before; got != tt.probes {
					t.Errorf("%d probes", p.probes(podA)-before)
				}
				if silent := len(l.guard.Stats().Silent) > 0; silent != (tt.evidence && tt.heard && tt.dead && tt.probes) {
					t.Errorf("silent: %v", silent)
				}
				// It comes back.
				p.set(podA, true)
				time.Sleep(2 * time.Second)
				if s := l.guard.Stats().Silent; len(s) != 0 {
					t.Errorf("still believed dead: %v", s)
				}
			})
		})
	}
}

func counted(packets, replies uint64) ctguard.Flow {
	f := flow(1, vip, podA)
	f.Packets, f.Replies = packets, replies
	return f
}

// asks is a flow that sends a query each second, and has so many replies to
// each.
func asks(before, replies int) func(int) ctguard.Flow {
	return func(s int) ctguard.Flow { return counted(uint64(before+10+s), uint64(before+s*replies)) }
}

func neverReplied(int) ctguard.Flow {
	f := flow(1, vip, podA)
	f.SeenReply, f.Assured = false, false
	f.Remaining = 27 * time.Second
	return f
}
