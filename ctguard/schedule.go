package ctguard

import "time"

// sweepsAfterChange are the sweeps that follow a change. kube-proxy gets the
// same news and takes up to a second to change its rules (minSyncPeriod), in
// large clusters much longer; until then it can make the flows again that
// were deleted. The first deletes them, the others what came back.
func sweepsAfterChange() [5]time.Duration {
	return [...]time.Duration{0, time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second}
}

const (
	// retryAfter is the pause before a sweep that makes up for something
	// refused or gone wrong. After quickRetries in a row it grows by as much
	// with each.
	retryAfter   = time.Second
	quickRetries = 5

	// drainEvery is how often flows to terminating endpoints are looked at,
	// in search of idle ones, and flows to such as are believed dead.
	drainEvery = 2 * time.Second

	// evidenceEvery is how often the counters of flows are compared.
	evidenceEvery = 5 * time.Second

	// drainShare bounds what these two cost on a large table: at most one part in
	// so many of a CPU.
	drainShare = 20
)

// schedule says when to sweep next. The zero value has nothing to do.
type schedule struct {
	resync   time.Duration
	evidence bool // counters are to be compared

	changed time.Time // the last change
	step    int       // the next of sweepsAfterChange's, if changed is set
	soon    bool      // a sweep is wanted as soon as possible
	retry   bool      // something was left undone
	retries int       // sweeps in a row that were to make up for something
	drain   bool      // there are flows to be looked at again soon

	before       time.Time // the end of the last sweep but one
	began, ended time.Time // the last sweep
}

// change starts the series of sweeps (again).
func (s *schedule) change(now time.Time) { s.changed, s.step = now, 0 }

// swept records a sweep, and whether it saw flows to be looked at again soon.
func (s *schedule) swept(began, ended time.Time, drain bool) {
	s.before, s.began, s.ended, s.drain = s.ended, began, ended, drain
	if s.retry {
		s.retries++
	} else {
		s.retries = 0
	}
	// A sweep that was wanted at once does not make up for what is to be done
	// a little later.
	s.retry = s.retry && s.soon
	s.soon = false
	after := sweepsAfterChange()
	for s.step < len(after) && !s.changed.Add(after[s.step]).After(began) {
		s.step++
	}
}

// next is the time of the next sweep. However much is going on, sweeps take
// hardly more than half of the time, or four fifths while there is news of the
// cluster, which is urgent and seldom comes for long. The first in a crowd does
// not wait at all.
func (s *schedule) next(now time.Time) time.Time {
	took := s.ended.Sub(s.began)
	at := s.began.Add(s.resync)
	earlier := func(t time.Time) {
		if t.Before(at) {
			at = t
		}
	}
	if after := sweepsAfterChange(); s.step < len(after) && !s.changed.IsZero() {
		earlier(s.changed.Add(after[s.step]))
	}
	if s.retry {
		earlier(s.ended.Add(retryAfter * time.Duration(max(1, s.retries-quickRetries+1))))
	}
	if s.drain {
		earlier(s.ended.Add(max(drainEvery, drainShare*took)))
	}
	if s.evidence {
		earlier(s.ended.Add(max(evidenceEvery, drainShare*took)))
	}
	if s.soon {
		earlier(now)
	}
	gap := took
	if s.changed.After(s.began) {
		gap = took / 4
	}
	if free := s.ended.Add(gap); s.began.Sub(s.before) <= gap && at.Before(free) {
		at = free
	}
	return at
}
