package iptables

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestLedger plays what the kernel took and what arrived, a second a step.
func TestLedger(t *testing.T) {
	type step struct {
		after          time.Duration // since the step before; 0 means a second
		taken, arrived uint64
		gone           bool // the kernel has forgotten the client
		unfair         bool // nobody is to be judged
		blocked        time.Duration
		returned       bool
	}
	for name, steps := range map[string][]step{
		"served":                      {{taken: 10, arrived: 10}, {taken: 20, arrived: 20}, {taken: 30, arrived: 30}, {taken: 40, arrived: 40}},
		"idle":                        {{taken: 10, arrived: 10}, {taken: 10, arrived: 10}, {taken: 10, arrived: 10}},
		"arrives late":                {{taken: 2}, {taken: 2, arrived: 2}, {taken: 4, arrived: 2}, {taken: 4, arrived: 4}},
		"one datagram lost":           {{taken: 1}, {taken: 1}, {taken: 1}, {taken: 1}},
		"A and AAAA from the first":   {{taken: 2}, {taken: 2, blocked: firstBypass}},
		"one after the other":         {{taken: 1}, {taken: 2}, {taken: 2, blocked: firstBypass}},
		"was served, now kept away":   {{taken: 10, arrived: 10}, {taken: 12, arrived: 10}, {taken: 14, arrived: 10, blocked: firstBypass}},
		"some arrive":                 {{taken: 10, arrived: 10}, {taken: 14, arrived: 11}, {taken: 18, arrived: 12}, {taken: 22, arrived: 13}},
		"the service is hung":         {{taken: 5, unfair: true}, {taken: 9, unfair: true}, {taken: 9}, {taken: 9}, {taken: 9}},
		"the kernel forgot meanwhile": {{taken: 100, arrived: 100}, {taken: 1, arrived: 101}, {taken: 2, arrived: 102}},
		"returns, and is served": {
			{taken: 2},
			{taken: 2, blocked: firstBypass},
			{after: firstBypass - time.Second, taken: 2},
			{taken: 2, returned: true},
			{taken: 4, arrived: 4},
			{taken: 8, arrived: 8},
		},
		"returns in vain, twice as long each time": {
			{taken: 2},
			{taken: 2, blocked: firstBypass},
			{after: firstBypass, gone: true, returned: true},
			{taken: 2},
			{taken: 2, blocked: 2 * firstBypass},
			{after: 2 * firstBypass, gone: true, returned: true},
			{taken: 2},
			{taken: 2, blocked: 4 * firstBypass},
			{after: 4 * firstBypass, gone: true, returned: true},
			{taken: 2},
			{taken: 2, blocked: 8 * firstBypass},
			{after: 8 * firstBypass, gone: true, returned: true},
			{taken: 2},
			{taken: 2, blocked: longestBypass},
		},
		"forgiven after an hour": {
			{taken: 2},
			{taken: 2, blocked: firstBypass},
			{after: firstBypass, gone: true, returned: true},
			{after: longestBypass, gone: true},
			{gone: true},
			{taken: 2},
			{taken: 2, blocked: firstBypass},
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, now := newLedger(), time.Unix(1000, 0)
			c := Client{netip.MustParseAddr("10.244.0.7"), UDP}
			for i, s := range steps {
				now = now.Add(max(s.after, time.Second))
				if s.after > 0 {
					now = now.Add(s.after - max(s.after, time.Second))
				}
				taken := map[Client]uint64{c: s.taken}
				if s.gone {
					taken = nil
				}
				blocked, returned := l.weigh(now, !s.unfair, taken, func(Client) uint64 { return s.arrived })
				want := map[Client]time.Duration{}
				if s.blocked > 0 {
					want[c] = s.blocked
				}
				if diff := cmp.Diff(want, blocked, cmp.Comparer(sameClient)); diff != "" {
					t.Errorf("step %d: blocked (-want +got):\n%s", i, diff)
				}
				if got := slices.Contains(returned, c); got != s.returned {
					t.Errorf("step %d: returned: %v, want %v", i, got, s.returned)
				}
			}
		})
	}
}

func sameClient(a, b Client) bool { return a == b }

// TestLedgerForgets keeps no account of clients that have gone.
func TestLedgerForgets(t *testing.T) {
	l, now := newLedger(), time.Unix(1000, 0)
	taken := make(map[Client]uint64)
	for i := range 1000 {
		taken[Client{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), UDP}] = 1
	}
	l.weigh(now, true, taken, func(Client) uint64 { return 1 })
	if n := len(l.accounts); n != len(taken) {
		t.Errorf("%d accounts, want %d", n, len(taken))
	}
	l.weigh(now.Add(time.Second), true, nil, func(Client) uint64 { return 1 })
	if len(l.accounts) != 0 {
		t.Errorf("accounts that are left: %v", slices.Collect(maps.Keys(l.accounts)))
	}
}

// TestLedgerUndo: who could not be let past is found again.
func TestLedgerUndo(t *testing.T) {
	l, now := newLedger(), time.Unix(1000, 0)
	c := Client{netip.MustParseAddr("10.244.0.7"), UDP}
	found := 0
	for i := range uint64(8) {
		now = now.Add(time.Second)
		blocked, _ := l.weigh(now, true, map[Client]uint64{c: 2 * i}, func(Client) uint64 { return 0 })
		found += len(blocked)
		l.undo(blocked)
	}
	if found < 2 || l.bypassed() != 0 {
		t.Errorf("found %d times, %d bypassed", found, l.bypassed())
	}
}
