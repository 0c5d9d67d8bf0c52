package upstream

import "sync"

// Kind is a kind of second question, as the budget knows them.
type Kind uint8

// The kinds.
const (
	Hedge Kind = iota
	Retry

	numKinds
)

// String returns the kind in the form of a metric's label.
func (k Kind) String() string { return [numKinds]string{"hedge", "retry"}[k] }

// cost is what a question costs in tokens, so that one per cent of it is one.
const cost = 100

const (
	// allowance is what a bucket starts with, in questions: a quiet node's
	// first lost packets are asked for again. It is lent: see bucket.
	allowance = 10
	// savings is how many questions' worth a bucket holds at most: what a
	// dead endpoint costs a busy node until its sockets are known.
	savings = 50
	// reserve, in questions, is kept for a confirmation, and lent beside the
	// allowance: hedges and retries do not spend it.
	reserve = maxConfirmations
)

// bucket is a token bucket that is filled by questions, not by time: a share of
// the load stays a share however slow the answers are. What it starts with is
// paid back before it fills again, so that over any number of questions n since
// the start no more than max(allowance, percent/100 * n) are allowed.
type bucket struct {
	percent, tokens, debt int
}

func newBucket(percent int) bucket {
	if percent == 0 {
		return bucket{}
	}
	return bucket{percent: percent, tokens: allowance * cost, debt: allowance * cost}
}

func (b *bucket) earn() {
	if b.debt > 0 {
		b.debt -= b.percent
		return
	}
	b.tokens = min(b.tokens+b.percent, savings*cost)
}

// budget bounds the extra questions of a route: each kind by a bucket of its
// own, and both together by the larger percentage.
type budget struct {
	mu     sync.Mutex
	kinds  [numKinds]bucket
	both   bucket
	denied [numKinds]uint64
}

func newBudget(c Budget) *budget {
	b := &budget{
		kinds: [numKinds]bucket{Hedge: newBucket(c.Hedge), Retry: newBucket(c.Retry)},
		both:  newBucket(max(c.Hedge, c.Retry)),
	}
	if b.both.percent > 0 {
		b.both.tokens += reserve * cost
		b.both.debt += reserve * cost
	}
	return b
}

// earn counts one question asked for the first time.
func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.kinds {
		b.kinds[k].earn()
	}
	b.both.earn()
}

// spend takes what an extra question costs, if it is there. fruitful is false
// where asking again would not help, since most questions go unanswered.
func (b *budget) spend(k Kind, fruitful bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !fruitful || b.kinds[k].tokens < cost || b.both.tokens < (1+reserve)*cost {
		b.denied[k]++
		return false
	}
	b.kinds[k].tokens -= cost
	b.both.tokens -= cost
	return true
}

// confirm takes what a confirmation costs, if it is there, or anyway: then it is
// owed, and no second question goes until it is paid back.
func (b *budget) confirm(questions int, anyway bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.both.tokens < questions*cost && !anyway {
		return false
	}
	b.both.tokens -= questions * cost
	return true
}

// refund gives back what was taken and not spent.
func (b *budget) refund(questions int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.both.tokens += questions * cost
}

// spendMany takes what many extra questions cost: ask is told how many there may
// be and returns how many there are.
func (b *budget) spendMany(ask func(most int) int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if most := b.both.tokens/cost - reserve; most > 0 {
		b.both.tokens -= ask(most) * cost
	}
}

func (b *budget) refused() [numKinds]uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.denied
}

// share is the recent share of questions of which something is true, an
// exponential average over about the last 32 of them, in 1/1024.
type share int

const (
	whole = 1024
	// mostly is the share from which "most questions fail". Half would be
	// too little: with one of two endpoints dead, half of all new sockets
	// lead nowhere, and there asking again does help.
	mostly share = whole * 3 / 4
)

func (s *share) add(is bool) {
	if is {
		*s += (whole - *s + 31) / 32
	} else {
		*s -= (*s + 31) / 32
	}
}
