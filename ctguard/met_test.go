package ctguard

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestMetIsBounded: which endpoints there have been is remembered for an hour after
// they left, of at most 1,024; those that are present and serve, always.
func TestMetIsBounded(t *testing.T) {
	k := newKnowledge(nil, false)
	now := time.Now()
	tell := func(es ...Endpoint) {
		k.update(snapshotOf(es...), nil, now)
		now = now.Add(time.Second)
	}
	pod := func(i int) string { return fmt.Sprintf("10.245.%d.%d:53", i/250, 1+i%250) }
	met := func(a string) bool { _, ok := k.met[netip.MustParseAddrPort(a)]; return ok }

	starting := up(podA)
	starting.Serving = false
	tell(up(podB), starting)
	if !met(podB) || met(podA) {
		t.Errorf("met %v, want only what serves", k.met)
	}
	tell(up(podB))
	if !met(podA) {
		t.Error("an endpoint that has left is not known")
	}
	const many = 2000
	for i := range many {
		tell(up(podB), up(pod(i)))
	}
	tell(up(podB))
	if len(k.met) != 1+mostMet {
		t.Errorf("%d are remembered", len(k.met))
	}
	if met(podA) || met(pod(0)) || !met(pod(many-1)) || !met(podB) {
		t.Error("not the latest are remembered")
	}

	// It comes back, and leaves again: its hour begins anew.
	now = now.Add(50 * time.Minute)
	tell(up(podB), up(pod(many-1)))
	tell(up(podB))
	now = now.Add(59 * time.Minute)
	if k.expire(now) != true || !met(pod(many-1)) || len(k.met) != 2 {
		t.Errorf("%d are remembered after an hour", len(k.met))
	}
	now = now.Add(2 * time.Minute)
	if !k.expire(now) || k.expire(now) || len(k.met) != 1 || !met(podB) {
		t.Errorf("met %v", k.met)
	}
}

// TestRecalledAreForgotten: so are those that a guard knows of its predecessor.
func TestRecalledAreForgotten(t *testing.T) {
	newGuard := func() *Guard {
		g, err := New(Config{Table: &Kernel{}})
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	before, g := newGuard(), newGuard()
	before.Update(snapshotOf(up(podA), up(podB)))
	g.Recall(before)
	g.Update(snapshotOf(up(podB)))
	if len(g.know.met) != 2 {
		t.Errorf("met %v", g.know.met)
	}
	g.know.expire(time.Now().Add(metFor))
	if _, ok := g.know.met[netip.MustParseAddrPort(podB)]; !ok || len(g.know.met) != 1 {
		t.Errorf("met %v", g.know.met)
	}
}
