package ctguard

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"
)

// knowledge is the latest snapshot and all that the guard has learnt itself.
// It turns both into policies.
type knowledge struct {
	snapshot   *Snapshot // nil before the first
	at         time.Time // when it came, or last differed
	zones      []uint16
	evidence   bool
	timeouts   Timeouts
	translated map[netip.AddrPort]bool
	silent     map[netip.AddrPort]bool
	ipvs       map[netip.AddrPort]bool
	tombstones map[netip.AddrPort]tombstone
	doubt      bool
	probes     bool                    // what is not known is probed
	listed     map[netip.AddrPort]bool // the snapshot's endpoints, serving or not
	mute       map[netip.AddrPort]bool // endpoints that are not known and do not answer

	// met are the endpoints that are known: of which this snapshot or one before
	// has said that they serve or terminate, and all that have left, with the time
	// at which they did.
	met map[netip.AddrPort]time.Time
}

const (
	// metFor is how long an endpoint is remembered that has left: many times as
	// long as its flows can last, and soon enough for the address to be another
	// pod's.
	metFor = time.Hour

	// mostMet bounds those that are.
	mostMet = 1024
)

// tombstone marks a frontend that has gone.
type tombstone struct {
	frontend Frontend
	since    time.Time
	until    time.Time
}

func newKnowledge(zones []uint16, evidence bool) *knowledge {
	return &knowledge{
		zones:      zones,
		evidence:   evidence,
		timeouts:   DefaultTimeouts(),
		translated: make(map[netip.AddrPort]bool),
		silent:     make(map[netip.AddrPort]bool),
		tombstones: make(map[netip.AddrPort]tombstone),
		listed:     make(map[netip.AddrPort]bool),
		mute:       make(map[netip.AddrPort]bool),
		met:        make(map[netip.AddrPort]time.Time),
	}
}

// update takes a new snapshot and tells whether it says anything new. Frontends
// that it lacks become tombstones for twice the longest time that a flow can
// last without a packet.
func (k *knowledge) update(s *Snapshot, old *Policy, now time.Time) bool {
	if k.snapshot != nil && reflect.DeepEqual(k.snapshot, s) {
		return false
	}
	k.snapshot, k.at = s, now
	next := NewPolicy(*s, Facts{})
	k.meet(next, now)
	if old != nil {
		for _, f := range old.present() {
			if _, still := next.frontends[f.Addr]; !still {
				k.tombstones[f.Addr] = tombstone{f, now, now.Add(2 * k.timeouts.longest())}
			}
		}
	}
	maps.DeleteFunc(k.tombstones, func(a netip.AddrPort, _ tombstone) bool {
		_, again := next.frontends[a]
		return again
	})
	maps.DeleteFunc(k.translated, func(a netip.AddrPort, _ bool) bool {
		_, still := next.frontends[a]
		return !still
	})
	return true
}

// meet takes the endpoints of the next snapshot.
func (k *knowledge) meet(next *Policy, now time.Time) {
	before := k.listed
	k.listed = make(map[netip.AddrPort]bool)
	for _, t := range next.frontends {
		for at, e := range t.endpoints {
			k.listed[at] = true
			if _, met := k.met[at]; met || e.Serving || e.Terminating {
				k.met[at] = time.Time{}
			}
		}
	}
	for at := range before {
		if !k.listed[at] {
			k.met[at] = now
		}
	}
	k.forget(now)
}

// forget removes endpoints that left long ago, and, of too many, those that left
// first.
func (k *knowledge) forget(now time.Time) {
	var left []netip.AddrPort
	for at, since := range k.met {
		switch {
		case since.IsZero():
		case now.Sub(since) >= metFor:
			delete(k.met, at)
		default:
			left = append(left, at)
		}
	}
	if len(left) <= mostMet {
		return
	}
	slices.SortFunc(left, func(a, b netip.AddrPort) int { return k.met[a].Compare(k.met[b]) })
	for _, at := range left[:len(left)-mostMet] {
		delete(k.met, at)
	}
}

// expire removes tombstones and endpoints whose time is over and tells whether it
// did.
func (k *knowledge) expire(now time.Time) bool {
	n, m := len(k.tombstones), len(k.met)
	maps.DeleteFunc(k.tombstones, func(_ netip.AddrPort, t tombstone) bool { return !now.Before(t.until) })
	k.forget(now)
	return len(k.tombstones) != n || len(k.met) != m
}

// lag is how long a flow that is made anew to a vanished frontend is put down
// to kube-proxy's being late: its last regular sync after a change in a large
// cluster.
const lag = 10 * time.Second

// refute removes the tombstone at a frontend to which translated flows are
// still being made: someone else serves that address now, such as a Service
// of another name.
func (k *knowledge) refute(at netip.AddrPort, now time.Time) bool {
	t, ok := k.tombstones[at]
	if !ok || now.Sub(t.since) < lag {
		return false
	}
	delete(k.tombstones, at)
	return true
}

// set makes m[at] equal to v and tells whether that changed it.
func set(m map[netip.AddrPort]bool, at netip.AddrPort, v bool) bool {
	if m[at] == v {
		return false
	}
	if v {
		m[at] = true
	} else {
		delete(m, at)
	}
	return true
}

// policy is what all of it amounts to, or nil before the first snapshot.
func (k *knowledge) policy() *Policy {
	if k.snapshot == nil {
		return nil
	}
	var gone []Frontend
	for _, t := range k.tombstones {
		gone = append(gone, t.frontend)
	}
	facts := Facts{
		Timeouts:   k.timeouts,
		Zones:      slices.Clone(k.zones),
		Translated: maps.Clone(k.translated),
		Silent:     maps.Clone(k.silent),
		Evidence:   k.evidence,
		IPVS:       maps.Clone(k.ipvs),
		Tombstones: gone,
		Doubt:      k.doubt,
		Probes:     k.probes,
		Mute:       maps.Clone(k.mute),
	}
	if k.doubt || k.probes {
		facts.Met = make(map[netip.AddrPort]bool, len(k.met))
		for at := range k.met {
			facts.Met[at] = true
		}
	}
	return NewPolicy(*k.snapshot, facts)
}
