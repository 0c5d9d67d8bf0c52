package ctguard

import "time"

// counts are a flow's packets in both directions.
type counts struct{ packets, replies uint64 }

const (
	// patience is how long a reply may take before its absence is evidence.
	// It only has to be longer than a DNS server's ordinary answer: what
	// follows is a probe.
	patience = time.Second

	// unansweredQueries is how many queries of a flow may be without answers,
	// lost one by one over its life, before it is watched.
	unansweredQueries = 2
)

// witness takes a flow's testimony against its endpoint. A flow that has never
// had a reply speaks for itself. Of others the counters are kept, if they
// differ, so that the next sweep can see whether the gap widens: of so many, in
// the table's order, that these are witnesses enough. (The kernel's
// "seen reply" bit stays for ever and tells nothing.)
func (s *survey) witness(p *Policy, f Flow, r Reason) {
	if r != Serving && r != Unanswered {
		return
	}
	switch {
	case !f.SeenReply && p.facts.Timeouts.Idle(f) >= patience:
		s.unheard[f.Reply.Src] = true
	case f.SeenReply && f.Packets >= f.Replies+unansweredQueries && len(s.waiting) < mostKnown:
		s.waiting[keyOf(f)] = counts{f.Packets, f.Replies}
	}
}

// accuse has those endpoints probed whose flows have sent queries since the
// last sweep, and have had no reply.
func (r *runner) accuse(s *survey) {
	for k, now := range s.waiting {
		before, known := r.waiting[k]
		if known && now.packets > before.packets && now.replies == before.replies {
			s.unheard[k.reply.Src] = true
		}
	}
	r.waiting = s.waiting
	for at := range s.unheard {
		if f := r.followers[at]; f != nil {
			f.doubt()
		}
	}
}
