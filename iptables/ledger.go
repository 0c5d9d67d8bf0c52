package iptables

import (
	"slices"
	"time"
)

const (
	// weighEvery is how often what was taken is compared with what arrived.
	weighEvery = time.Second
	// sharedFor is how long after another process's end nobody is judged: what
	// was taken in the last interval of its life is weighed in the next two.
	sharedFor = 2*weighEvery + checkEvery
	// enoughUnanswered is how many datagrams or connection attempts in a row may
	// not arrive: one may be lost, as on any network. Every one counts, so this
	// is one lookup of a libc that asks for A and AAAA.
	enoughUnanswered = 2
	// firstBypass and longestBypass bound how long a client is let past: twice
	// as long each time that it turns out to be still unable to reach us,
	// since to find out costs it a lookup.
	firstBypass   = 5 * time.Minute
	longestBypass = time.Hour
)

// ledger finds clients whose packets are taken but do not arrive: a network
// policy or host firewall drops what now goes to this node (hook INPUT) rather
// than through it (FORWARD).
type ledger struct {
	accounts map[Client]*account
}

// account is what is known of one client.
type account struct {
	taken, received uint64        // when last weighed
	unanswered      uint64        // taken since it was last received, up to the weighing before
	fresh           uint64        // taken in the last interval: it may be on its way
	length          time.Duration // of the last bypass
	until           time.Time     // end of the bypass, zero if there is none
	seen            time.Time     // when it was last taken, or let past
}

func newLedger() *ledger { return &ledger{accounts: make(map[Client]*account)} }

// weigh compares. blocked are clients to let past, for the given times;
// returned are those whose time is up. If the service as a whole does not
// answer, or others take part, nobody is judged.
func (l *ledger) weigh(now time.Time, judge bool, taken map[Client]uint64, received func(Client) uint64) (blocked map[Client]time.Duration, returned []Client) {
	blocked = make(map[Client]time.Duration)
	for c, a := range l.accounts {
		if !a.until.IsZero() && !now.Before(a.until) {
			a.until, a.seen = time.Time{}, now
			a.unanswered, a.fresh = 0, 0
			returned = append(returned, c)
		}
		if _, asks := taken[c]; !asks {
			a.taken = 0 // the kernel has forgotten it, and counts from zero
			// Who was let past is remembered for some time.
			if a.until.IsZero() && (a.length == 0 || now.Sub(a.seen) > longestBypass) {
				delete(l.accounts, c)
			}
		}
	}
	for c, n := range taken {
		arrived := received(c)
		a, known := l.accounts[c]
		if !known {
			// What arrived before is unknown: start with this interval.
			l.accounts[c] = &account{taken: n, received: arrived, fresh: n, seen: now}
			if arrived > 0 {
				l.accounts[c].fresh = 0
			}
			continue
		}
		grown := n - a.taken
		if n < a.taken { // forgotten and seen anew between two looks
			grown = n
		}
		switch {
		case !judge, arrived != a.received, !a.until.IsZero():
			a.unanswered, a.fresh = 0, 0
		default:
			a.unanswered, a.fresh = a.unanswered+a.fresh, grown
		}
		if arrived != a.received {
			a.length = 0
		}
		a.taken, a.received, a.seen = n, arrived, now
		if a.unanswered >= enoughUnanswered {
			a.length = min(max(2*a.length, firstBypass), longestBypass)
			a.until = now.Add(a.length)
			a.unanswered, a.fresh = 0, 0
			blocked[c] = a.length
		}
	}
	slices.SortFunc(returned, compareClients)
	return blocked, returned
}

// undo takes back that clients are let past: it could not be done.
func (l *ledger) undo(blocked map[Client]time.Duration) {
	for c := range blocked {
		l.accounts[c].until = time.Time{}
	}
}

// bypassed counts the clients that are let past.
func (l *ledger) bypassed() int {
	n := 0
	for _, a := range l.accounts {
		if !a.until.IsZero() {
			n++
		}
	}
	return n
}

func compareClients(a, b Client) int {
	if c := a.Addr.Compare(b.Addr); c != 0 {
		return c
	}
	return int(b.Proto) - int(a.Proto)
}
