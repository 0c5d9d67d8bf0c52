package upstream

import (
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

const (
	// maxConfirmations is how many questions a confirmation is made of.
	maxConfirmations = 3
	// maxRefused is how often a confirmation asks again over another socket where
	// nobody listened: behind a ClusterIP, or an anycast address, others may. Half
	// of them being dead, eight questions refused in all are a chance of 1 in 256.
	maxRefused = 5
	// A confirmation waits for maxConfirm: a server that answers nothing for
	// silence and this, not even what it has in its cache, is as good as dead to
	// clients that wait for 1.5 s. The round trips so far are no reason to wait for
	// less: a server that takes 1 ms may take 900 under load. One that an exchange
	// waits for is given less, but minConfirm.
	minConfirm = 500 * time.Millisecond
	maxConfirm = time.Second
	// confirmAnyway is how long after a confirmation the next is free to put
	// the budget into debt. It bounds how long a death goes unnoticed on a
	// node whose budget is spent on names that nobody can answer.
	confirmAnyway = time.Minute
)

// known is a question that a server has given a good answer to: the last.
type known struct {
	hash     uint64
	question []byte
}

// ask returns the question.
func (k *known) ask() Question {
	name, fixed := k.question[:len(k.question)-4], k.question[len(k.question)-4:]
	return Question{
		Name: dnswire.AppendFolded(nil, name),
		Type: binary.BigEndian.Uint16(fixed), Class: binary.BigEndian.Uint16(fixed[2:]),
	}
}

// remember keeps the question of an exchange that got a good answer; the caller
// holds mu.
func (s *server) remember(x *exchange) {
	s.known.hash = x.hash
	s.known.question = append(s.known.question[:0], x.question()...)
}

// startConfirmation finds out whether a path that is in doubt works; the caller
// holds mu. broken tells that the doubt is whether its answers are of use, and
// not whether there are any. It takes no longer than most.
func (s *server) startConfirmation(r *route, t Transport, broken bool, most time.Duration) {
	p := &s.paths[t]
	if p.confirming || s.f.closed.Load() {
		return
	}
	p.confirming = true
	s.f.running.Add(1)
	go s.confirm(r, t, broken, most)
}

// confirm asks what is known to be answerable, and declares the path down if
// that is not answered. What speaks against a path is questions unanswered, and
// those may be the questions' own fault: names whose servers are dead.
func (s *server) confirm(r *route, t Transport, broken bool, most time.Duration) {
	defer s.f.running.Done()
	start := s.f.now()
	questions := s.confirmable(t, broken)
	s.mu.Lock()
	wait := min(maxConfirm, most)
	anyway := start-s.paths[t].confirmed >= confirmAnyway
	p := &s.paths[t]
	pace := max(p.hedgeDelay(), min(p.srtt+4*p.rttvar, wait/2))
	// The last has time to be answered, and where that does not go together, the
	// first before the second is asked.
	pace = max(min(pace, (wait-p.srtt*5/4)/2), min(p.srtt*9/8, wait/2), wait/5)
	s.unlock()
	works := unknown
	if r.budget.confirm(maxConfirmations, anyway) {
		var asked int
		works, asked = s.tryOut(r, t, questions, wait, pace, broken)
		r.budget.refund(maxConfirmations - asked)
	}
	now := s.f.now()
	s.mu.Lock()
	defer s.unlock()
	p.confirming = false
	switch {
	case works == unknown:
	case works == no && (broken || p.heard < start): // the answer to another question does as well
		s.takeDown(t, now)
		fallthrough
	default:
		p.vouched, p.scouts = works == yes, 1
		p.confirmed, p.silent, p.broken = now, ledger{}, ledger{}
	}
	for _, x := range p.awaiting {
		x.events <- event{what: verified}
	}
	p.awaiting = nil
}

// confirmable returns the questions for a confirmation: the last that the server
// has answered, unless it is one of those that it does not answer now, and the
// root's name servers, which every resolver knows.
func (s *server) confirmable(t Transport, broken bool) []Question {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	root := Question{Name: []byte{0}, Type: dnswire.TypeNS, Class: dnswire.ClassIN}
	if len(s.known.question) == 0 || p.silent.has(s.known.hash) || broken && p.broken.has(s.known.hash) {
		return []Question{root, root, root}
	}
	k := s.known.ask()
	return []Question{k, root, k}
}

// finding is what a confirmation has found.
type finding uint8

const (
	unknown finding = iota // there was no way to ask
	no
	yes
)

// tryOut asks one question after the other, each over a new socket of its own,
// and returns whether one is answered in time; if broken, by something else than
// an error. It also returns how many it has asked: a path that works costs one.
func (s *server) tryOut(r *route, t Transport, questions []Question, wait, pace time.Duration, broken bool) (found finding, asked int) {
	var xs [maxConfirmations]*exchange
	var events [maxConfirmations]<-chan event
	timer := time.NewTimer(wait)
	defer timer.Stop()
	// The last goes without OPT, unless errors are the trouble: some firewalls
	// and servers begin to drop queries with one.
	last, by := len(questions)-1, -1
	if broken {
		last = -1
	}
	open, refused, next := 0, 0, time.NewTimer(0)
	defer next.Stop()
	again := func(i int, plain bool) {
		s.f.release(xs[i])
		events[i] = nil
		if xs[i] = s.ask(r, t, &questions[i], confirming, plain); xs[i] != nil {
			events[i] = xs[i].events
			open++
		}
	}
	for found != yes && (open > 0 || asked < len(questions)) {
		i, e := 0, event{}
		select {
		case <-next.C:
			if x := s.ask(r, t, &questions[asked], confirming, asked == last); x != nil {
				xs[asked], events[asked] = x, x.events
				open++
			}
			if asked++; asked < len(questions) {
				next.Reset(pace)
			}
			continue
		case <-timer.C:
			found, open, asked = max(found, no), 0, len(questions)
			continue
		case e = <-events[0]:
		case e = <-events[1]:
			i = 1
		case e = <-events[2]:
			i = 2
		}
		if e.what != answered && e.what != failed {
			continue
		}
		open--
		a := xs[i].at(int(e.attempt))
		a.waiting = false
		switch {
		case e.what == failed && (IsLocal(a.err) || errors.Is(a.err, errClosed)):
		case e.what == answered && (!broken || a.cut || !a.failure):
			found, by = yes, i
			continue
		case e.what == answered && a.edns && chokes(a.got.response.Rcode):
			again(i, true) // as the answer asks for
			continue
		case errors.Is(a.err, unix.ECONNREFUSED) && refused < maxRefused:
			found = no
			refused++
			again(i, i == last)
			continue
		default:
			found = no
		}
		if asked < len(questions) {
			next.Reset(0) // a refusal comes at once, and so does the next question
		}
	}
	if by == last && !broken && xs[0] != nil && xs[0].at(0).waiting {
		// What it knows it has answered only without an OPT record.
		s.withoutOPT(xs[0].at(0), false, s.f.now())
	}
	for _, x := range xs {
		if x != nil {
			s.f.release(x)
		}
	}
	return found, asked
}

// ask asks the server a question of our own, over a new socket, plain without an
// OPT record. It returns nil if it could not.
func (s *server) ask(r *route, t Transport, q *Question, k attemptKind, plain bool) *exchange {
	x := s.f.exchanges.Get().(*exchange)
	x.begin(r, q)
	x.servers = []*server{s}
	x.plain = plain
	x.judged = true // it is no question of the load
	if !x.ask(0, t, k, true) {
		s.f.release(x)
		return nil
	}
	return x
}

// release makes an exchange that is over ready for the next question.
func (f *Forwarder) release(x *exchange) {
	x.finish()
	x.reset()
	f.exchanges.Put(x)
}

// startTrial tries a path that is down on a question that it was able to answer
// before. The copies of real questions, that it is tried on as well, may be such
// as nobody can answer. It reports whether there is such a question.
func (s *server) startTrial(r *route, t Transport) bool {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	if p.trials%2 == 0 || len(s.known.question) == 0 || s.f.closed.Load() {
		return false
	}
	q, plain := s.known.ask(), p.trials%4 == 3
	s.f.running.Go(func() {
		x := s.ask(r, t, &q, probed, plain)
		if x == nil {
			return
		}
		timer := time.NewTimer(s.f.config.Timeouts.Total)
		defer timer.Stop()
		for waiting := true; waiting; {
			select {
			case e := <-x.events:
				if e.what == answered || e.what == failed { // an answer has brought the path up
					x.at(0).waiting, waiting = false, false
				}
			case <-timer.C:
				waiting = false
			}
		}
		s.f.release(x)
	})
	return true
}
