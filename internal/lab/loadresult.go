package lab

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// LoadResult counts what became of a load. Sent is the sum of Answered, Lost,
// Wrong and Rcodes, unless the load was interrupted.
type LoadResult struct {
	Sent     int
	Answered int         // NOERROR with data, id and question as asked
	Lost     int         // no answer in time, or the connection broke
	Wrong    int         // the right id with another question, no data, or truncated
	Rcodes   map[int]int // answers with another code than NOERROR, by code
	Refused  int         // ICMP errors and connections refused or reset: a cause, not a sum
	Stray    int         // answers to nothing that was waiting: late, doubled, foreign
	Elapsed  time.Duration
	CPU      time.Duration // that the generator itself used, kernel time included

	interval time.Duration
	took     []time.Duration // by number of the query; negative: no good answer
	sorted   []time.Duration
}

// notAnswered marks queries without a good answer in LoadResult.took.
const notAnswered time.Duration = -1

// Failed counts the queries without a good answer.
func (r *LoadResult) Failed() int { return r.Sent - r.Answered }

// Percentile returns the latency, from the moment that a query was due, that p
// per cent of the answered queries did not exceed; 0 if none was answered.
func (r *LoadResult) Percentile(p float64) time.Duration {
	if r.sorted == nil {
		for _, d := range r.took[:r.Sent] {
			if d != notAnswered {
				r.sorted = append(r.sorted, d)
			}
		}
		slices.Sort(r.sorted)
	}
	if len(r.sorted) == 0 {
		return 0
	}
	i := int(p / 100 * float64(len(r.sorted)))
	return r.sorted[min(max(i, 0), len(r.sorted)-1)]
}

// LongestOutage returns the longest span of the schedule in which no query got
// a good answer, and where it began.
func (r *LoadResult) LongestOutage() (from, length time.Duration) {
	start := -1
	for i := 0; i <= r.Sent; i++ {
		failed := i < r.Sent && r.took[i] == notAnswered
		switch {
		case failed && start < 0:
			start = i
		case !failed && start >= 0:
			if d := time.Duration(i-start) * r.interval; d > length {
				from, length = time.Duration(start)*r.interval, d
			}
			start = -1
		}
	}
	return from, length
}

// String is one line for a test's log.
func (r *LoadResult) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d sent in %v: %d answered, %d lost, %d wrong", r.Sent, r.Elapsed.Round(time.Millisecond), r.Answered, r.Lost, r.Wrong)
	codes := make([]int, 0, len(r.Rcodes))
	for code := range r.Rcodes {
		codes = append(codes, code)
	}
	slices.Sort(codes)
	for _, code := range codes {
		fmt.Fprintf(&b, ", %d %s", r.Rcodes[code], dns.RcodeToString[code])
	}
	fmt.Fprintf(&b, " (%d refused, %d stray); latency p50 %v p99 %v max %v",
		r.Refused, r.Stray, r.Percentile(50), r.Percentile(99), r.Percentile(100))
	if from, length := r.LongestOutage(); length > 0 {
		fmt.Fprintf(&b, "; longest outage %v at %v", length, from)
	}
	return b.String()
}
