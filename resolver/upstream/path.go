package upstream

import (
	"sync/atomic"
	"time"
)

// Transport is a way to a server.
type Transport uint8

// The transports.
const (
	UDP Transport = iota
	TCP

	numTransports
)

// String returns the transport's name in lower case, as metrics and package
// net have it.
func (t Transport) String() string { return [numTransports]string{"udp", "tcp"}[t] }

func (t Transport) other() Transport { return 1 - t }

const (
	// A hedge is sent after about three round trips, but not before the
	// server's timer granularity and scheduling are out of the way, and not
	// later than a client notices.
	minHedge = 50 * time.Millisecond
	maxHedge = 250 * time.Millisecond
	// silence is how old an unanswered question must be to say something
	// about its path or its socket.
	silence = maxHedge
	// maxStrikes questions, all different, and not one answer since: the path
	// may be down. Two are what two lost packets look like on a quiet node.
	maxStrikes = 3
	// maxUnanswered is the same with repeats counted, for a node that asks but
	// one or two names.
	maxUnanswered = 4
	// A path that is down is tried again after minBackoff, then after twice
	// that, and so on, each with jitter.
	minBackoff = 2 * time.Second
	maxBackoff = time.Minute
)

// path is one server over one transport: its round trips, its health and its
// counters. All but the atomics are guarded by server.mu.
type path struct {
	down    atomic.Bool
	probeAt atomic.Int64 // when a path that is down may be tried again

	backoff time.Duration
	silent  ledger // questions unanswered since any answer
	broken  ledger // questions answered by an error since a good answer
	// confirmed is when it was last found out whether the path works, and
	// confirming that it is being found out now.
	confirmed  time.Duration
	confirming bool
	// outdone counts the questions in a row that another server had data for
	// and this one no answer.
	outdone int
	// vouched is a path that a confirmation has found to work, and that has
	// answered nothing else since. scouts of the questions that it lets wait
	// may be asked of the next server, to see whether that one does better.
	vouched  bool
	scouts   int
	trials   int           // of the path while it is down
	awaiting []*exchange   // told when the confirmation is over
	well     time.Duration // last good answer
	heard    time.Duration // last answer of any kind; negative before the first
	srtt     time.Duration // RFC 6298 section 2
	rttvar   time.Duration
	// overdue says of each kind how many questions were unanswered when it was
	// time for a second one.
	overdue [numKinds]share
	counters
}

// sample takes one round trip into the smoothed values (RFC 6298 section 2).
func (p *path) sample(rtt time.Duration) {
	if p.srtt == 0 {
		p.srtt, p.rttvar = rtt, rtt/2
		return
	}
	p.rttvar += ((p.srtt - rtt).Abs() - p.rttvar) / 4
	p.srtt += (rtt - p.srtt) / 8
}

// hedgeDelay returns when a second question is due. Where round trips differ
// much (a resolver that answers some names from its cache and fetches others),
// three times their mean would hedge every slow name; their deviation tells.
func (p *path) hedgeDelay() time.Duration {
	if p.srtt == 0 {
		return maxHedge
	}
	return min(max(3*p.srtt, p.srtt+4*p.rttvar, minHedge), maxHedge)
}

// due reports whether a path that is down is to be tried again.
func (p *path) due(now time.Duration) bool {
	return p.down.Load() && now >= time.Duration(p.probeAt.Load())
}

// ledger is what speaks against a path: the questions that it failed to answer.
type ledger struct {
	strikes [maxStrikes]strike
	n       int // of strikes
	total   int // with repeats
}

// strike is a question, and when its last exchange began.
type strike struct {
	question uint64
	start    time.Duration
}

// add enters an exchange's question, once for each exchange. It reports whether
// there is enough to doubt the path. A repeat of a question is no new strike: a
// name that nobody can answer says nothing about the server that is asked.
func (l *ledger) add(question uint64, start time.Duration) bool {
	i := 0
	for i < l.n && l.strikes[i].question != question {
		i++
	}
	switch {
	case i < l.n && start <= l.strikes[i].start:
		return false
	case i < maxStrikes:
		l.strikes[i] = strike{question, start}
		l.n = max(l.n, i+1)
	}
	l.total++
	return l.n == maxStrikes || l.total >= maxUnanswered
}

// has reports whether the question is one of the strikes.
func (l *ledger) has(question uint64) bool {
	for _, s := range l.strikes[:l.n] {
		if s.question == question {
			return true
		}
	}
	return false
}

// good counts a usable answer. It reports whether the path came up.
func (p *path) good() bool {
	p.broken = ledger{}
	return p.down.Swap(false)
}

// putOff lets the path alone for a while, each time longer; jitter returns a
// random share of its argument.
func (p *path) putOff(now time.Duration, jitter func(time.Duration) time.Duration) {
	p.backoff = min(max(2*p.backoff, minBackoff), maxBackoff)
	p.probeAt.Store(int64(now + p.backoff*3/4 + jitter(p.backoff/2)))
}
