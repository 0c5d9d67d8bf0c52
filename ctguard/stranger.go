package ctguard

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

const (
	// mostStrangers bounds the strangers that are probed at a time. The flows to
	// others are held until there is room.
	mostStrangers = 256

	// strangerEvery is about the pause between the checks of a stranger that
	// answers: when the news lag, they do on every node.
	strangerEvery = 5 * time.Second

	// forgetStranger is for how long a stranger is probed on without a flow to it.
	forgetStranger = time.Minute

	// overdue is when news would have come, or the watch's failure have been
	// noticed: client-go pings a connection after 30 s without a word, and waits
	// 15 s for the answer.
	overdue = time.Minute
)

// stranger is an endpoint to which flows lead, and of which no snapshot has said
// that it serves: kube-proxy has heard of it before us, or it was gone before the
// guard began. Probes tell which.
type stranger struct {
	endpoint netip.AddrPort
	since    time.Time

	// Guard.mu guards:

	seen     time.Time // when a flow to it was seen last
	answered time.Time // when it last was not silent, or since
}

// strangers are those there are at present. Guard.mu guards them.
type strangers struct {
	kicks chan struct{} // capacity 1: there are new ones
	all   map[netip.AddrPort]*stranger
	fresh []*stranger // that nobody probes yet
}

// notice notes, with mu held, that a flow leads to an endpoint that is not known.
func (g *Guard) notice(at netip.AddrPort, now time.Time) {
	if !g.know.probes {
		return
	}
	if s := g.strangers.all[at]; s != nil {
		s.seen = now
		return
	}
	if len(g.strangers.all) >= mostStrangers {
		return
	}
	s := &stranger{at, now, now, now}
	g.strangers.all[at] = s
	g.strangers.fresh = append(g.strangers.fresh, s)
	select {
	case g.strangers.kicks <- struct{}{}:
	default:
	}
}

// meet has each stranger probed, until ctx ends.
func (g *Guard) meet(ctx context.Context) {
	var probing sync.WaitGroup
	defer probing.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.strangers.kicks:
		}
		g.mu.Lock()
		fresh := g.strangers.fresh
		g.strangers.fresh = nil
		g.mu.Unlock()
		for _, s := range fresh {
			probing.Go(func() { g.sound(ctx, s) })
		}
	}
}

// sounding is what a check of a stranger has shown.
type sounding int

const (
	unsettled          sounding = iota // nobody answers, or no probe could be sent
	answers                            // it does
	silentBesideOthers                 // it does not, and another endpoint does
	alone                              // it does not, and no other serves
)

// sound probes a stranger until it is known, or no flow leads to it any more.
func (g *Guard) sound(ctx context.Context, s *stranger) {
	for {
		v := unsettled
		switch alive, silent := check(ctx, g.cfg.Prober, s.endpoint); {
		case alive:
			v = answers
		case silent:
			if others := g.peers(s.endpoint); len(others) == 0 {
				v = alone
			} else if someAnswer(ctx, g.cfg.Prober, others) {
				v = silentBesideOthers
			}
		}
		wait, done := g.judge(ctx, s, v)
		if done {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// peers are the endpoints of the same family that serve. They need not have
// answered before: the guard may just have begun.
func (g *Guard) peers(at netip.AddrPort) []netip.AddrPort {
	var others []netip.AddrPort
	for o := range g.policy.Load().servingEndpoints() {
		if o != at && o.Addr().Is4() == at.Addr().Is4() {
			others = append(others, o)
		}
	}
	return others
}

// judge draws the conclusions from a check, and tells when the next is due, if
// ever.
func (g *Guard) judge(ctx context.Context, s *stranger, v sounding) (wait time.Duration, done bool) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	k := g.know
	if v == answers {
		s.answered = now
	}
	switch _, met := k.met[s.endpoint]; {
	case ctx.Err() != nil:
		return 0, true
	case met, now.Sub(s.seen) > forgetStranger:
		delete(g.strangers.all, s.endpoint)
		if set(k.mute, s.endpoint, false) {
			g.policy.Store(k.policy())
		}
		return 0, true
	case v == answers && k.listed[s.endpoint] && !k.doubt && now.Sub(s.since) >= overdue:
		// The snapshot goes on to say that it does not serve.
		delete(g.strangers.all, s.endpoint)
		delete(k.mute, s.endpoint)
		k.met[s.endpoint] = time.Time{}
		g.condemned(now)
		g.learned()
		return 0, true
	case v == answers:
		if set(k.mute, s.endpoint, false) {
			g.learned()
		}
		return strangerEvery - strangerEvery/5 + rand.N(2*strangerEvery/5), false
	case v == silentBesideOthers, !k.doubt && (v == alone || now.Sub(s.answered) >= overdue):
		if set(k.mute, s.endpoint, true) {
			g.condemned(now)
			g.learned()
		}
	}
	return probeEvery, false
}
