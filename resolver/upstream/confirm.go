package upstream

import (
	"errors"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

const (
	// maxConfirmations is how many questions a confirmation is made of.
	maxConfirmations = 2
	// A confirmation waits for three round trips, but within these bounds. A
	// server that answers nothing for silence and this, not even what it has
	// in its cache, is as good as dead to clients that wait for 1.5 s.
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

// remember keeps the question of an exchange that got a good answer; the caller
// holds mu.
func (s *server) remember(x *exchange) {
	s.known.hash = x.hash
	s.known.question = append(s.known.question[:0], x.question()...)
}

// startConfirmation finds out whether a path that is in doubt works; the caller
// holds mu. broken tells that the doubt is whether its answers are of use, and
// not whether there are any.
func (s *server) startConfirmation(r *route, t Transport, broken bool) {
	p := &s.paths[t]
	if p.confirming || s.f.closed.Load() {
		return
	}
	p.confirming = true
	s.f.running.Add(1)
	go s.confirm(r, t, broken)
}

// confirm asks what is known to be answerable, and declares the path down if
// that is not answered. What speaks against a path is questions unanswered, and
// those may be the questions' own fault: names whose servers are dead.
func (s *server) confirm(r *route, t Transport, broken bool) {
	defer s.f.running.Done()
	start := s.f.now()
	asked := s.confirmable(t, broken)
	s.mu.Lock()
	wait := min(max(3*s.paths[t].srtt, minConfirm), maxConfirm)
	anyway := start-s.paths[t].confirmed >= confirmAnyway
	s.unlock()
	works := unknown
	if r.budget.confirm(len(asked), anyway) {
		works = s.tryOut(r, t, asked, wait, broken)
	}
	now := s.f.now()
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	p.confirming = false
	switch {
	case works == unknown:
		return
	case works == no && (broken || p.heard < start): // the answer to another question does as well
		s.takeDown(t, now)
	}
	p.confirmed, p.silent, p.broken = now, ledger{}, ledger{}
}

// confirmable returns the questions for a confirmation: the last that the server
// has answered, unless it is one of those that it does not answer now, and the
// root's name servers, which every resolver knows.
func (s *server) confirmable(t Transport, broken bool) []Question {
	s.mu.Lock()
	defer s.unlock()
	p := &s.paths[t]
	root := Question{Name: []byte{0}, Type: dnswire.TypeNS, Class: dnswire.ClassIN}
	k := s.known.question
	if len(k) == 0 || p.silent.has(s.known.hash) || broken && p.broken.has(s.known.hash) {
		return []Question{root}
	}
	q := dnswire.AppendFolded(nil, k[:len(k)-4])
	qtype, class := k[len(k)-4:len(k)-2], k[len(k)-2:]
	return []Question{
		{Name: q, Type: uint16(qtype[0])<<8 | uint16(qtype[1]), Class: uint16(class[0])<<8 | uint16(class[1])},
		root,
	}
}

// finding is what a confirmation has found.
type finding uint8

const (
	unknown finding = iota // there was no way to ask
	no
	yes
)

// tryOut asks each question once, over a new socket of its own, and returns
// whether one is answered in time; if broken, by something else than an error.
func (s *server) tryOut(r *route, t Transport, questions []Question, wait time.Duration, broken bool) finding {
	var xs [maxConfirmations]*exchange
	var events [maxConfirmations]<-chan event
	found, open := unknown, 0
	for i := range questions {
		x := s.f.exchanges.Get().(*exchange)
		x.begin(r, &questions[i])
		x.servers = []*server{s}
		x.judged = true // it is no question of the load
		if x.ask(0, t, confirming, true) {
			events[i] = x.events
			open++
		}
		xs[i] = x
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for found != yes && open > 0 {
		i, e := 0, event{}
		select {
		case e = <-events[0]:
		case e = <-events[1]:
			i = 1
		case <-timer.C:
			found, open = no, 0
			continue
		}
		if e.what != answered && e.what != failed {
			continue
		}
		open--
		a := xs[i].at(int(e.attempt))
		a.waiting = false
		switch {
		case e.what == failed && (isLocal(a.err) || errors.Is(a.err, errClosed)):
		case e.what == answered && (!broken || a.cut || !a.failure):
			found = yes
		default:
			found = no
		}
	}
	for _, x := range xs[:len(questions)] {
		x.finish()
		x.reset()
		s.f.exchanges.Put(x)
	}
	return found
}
