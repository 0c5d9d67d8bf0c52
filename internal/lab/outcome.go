package lab

import (
	"errors"
	"fmt"
	"time"

	"github.com/miekg/dns"
)

// How a query can fail. A bad response code is a RcodeError.
var (
	// ErrTimeout means that nothing came back in time.
	ErrTimeout = errors.New("no answer in time")
	// ErrRefused means that an ICMP error came back: nobody listens there.
	ErrRefused = errors.New("port unreachable")
	// ErrMismatch means an answer to something else than was asked.
	ErrMismatch = errors.New("answer does not match the question")
)

// RcodeError is a response code other than NOERROR.
type RcodeError int

// Error names the code.
func (e RcodeError) Error() string {
	if name, ok := dns.RcodeToString[int(e)]; ok {
		return "answered " + name
	}
	return fmt.Sprintf("answered RCODE %d", int(e))
}

// Outcome is what became of one query.
type Outcome struct {
	Seq  int // 0, 1, 2 ... in the order of sending
	Name string
	Sent time.Time
	Took time.Duration // until the answer, or until it was given up
	Err  error         // nil: answered; ErrTimeout, ErrRefused, ErrMismatch, RcodeError or what the socket said
}

// Timeline is a client's outcomes in the order of sending.
type Timeline []Outcome

// Failed counts the queries without a good answer.
func (t Timeline) Failed() int {
	n := 0
	for _, o := range t {
		if o.Err != nil {
			n++
		}
	}
	return n
}

// Answered counts the queries with a good answer.
func (t Timeline) Answered() int { return len(t) - t.Failed() }

// Slowest returns the longest time that a good answer took.
func (t Timeline) Slowest() time.Duration {
	var longest time.Duration
	for _, o := range t {
		if o.Err == nil {
			longest = max(longest, o.Took)
		}
	}
	return longest
}

// LongestOutage returns the longest time in which the client got no answer
// although it asked: from the sending of a query that failed until the next
// good answer arrived; over is false if none arrived before the last query was
// given up.
func (t Timeline) LongestOutage() (outage time.Duration, over bool) {
	over = true
	for i := 0; i < len(t); i++ {
		if t[i].Err == nil {
			continue
		}
		first := t[i]
		for i < len(t) && t[i].Err != nil {
			i++
		}
		last, ended := t[min(i, len(t)-1)], i < len(t)
		if length := last.Sent.Add(last.Took).Sub(first.Sent); length > outage {
			outage, over = length, ended
		}
	}
	return outage, over
}
