package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/bench/internal/proc"
	"github.com/miekg/dns"
)

// result is what one run saw. Its JSON form is read by bench/run.
type result struct {
	Server  string  `json:"server"`
	Loop    string  `json:"loop"` // "window N" or "rate N"
	Ports   int     `json:"ports"`
	Seconds float64 `json:"seconds"`

	Sent       uint64            `json:"sent"`
	Answered   uint64            `json:"answered"`
	Lost       uint64            `json:"lost"`
	Mismatched uint64            `json:"mismatched"` // right id, wrong question
	Unexpected uint64            `json:"unexpected"` // no such id in flight: late or doubled
	Refused    uint64            `json:"refused"`    // errors of send and receive
	Truncated  uint64            `json:"truncated"`
	Rcodes     map[string]uint64 `json:"rcodes"`

	QPS     float64 `json:"qps"`
	Latency latency `json:"latency_us"`
	CPU     *cpu    `json:"server_cpu,omitempty"`
	// Busy is the share of its time that the generator computed. Near 1 without
	// -busy, it was the limit and not the server.
	Busy float64 `json:"generator_busy"`

	elapsed        time.Duration
	answeredInTime uint64 // before the wait at the end
	rcodes         [16]uint64
	latencies      histogram
}

// latency is in microseconds.
type latency struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// cpu is the server's, in microseconds per answered query.
type cpu struct {
	User float64 `json:"user_us_per_query"`
	Sys  float64 `json:"sys_us_per_query"`
	Both float64 `json:"us_per_query"`
}

// answer counts one good answer.
func (r *result) answer(msg []byte, took time.Duration) {
	r.Answered++
	r.rcodes[msg[3]&0x0f]++
	if msg[2]&0x02 != 0 {
		r.Truncated++
	}
	r.latencies.record(took)
}

// finish derives what is reported from what was counted. server and own are the
// CPU times spent during the run; server is nil where it was not watched.
func (r *result) finish(server *proc.Times, own proc.Times) {
	r.Seconds = r.elapsed.Seconds()
	r.QPS = float64(r.answeredInTime) / r.Seconds
	for code, n := range r.rcodes {
		if n > 0 {
			r.Rcodes[dns.RcodeToString[code]] = n
		}
	}
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	r.Latency = latency{
		Mean: us(r.latencies.mean()),
		P50:  us(r.latencies.quantile(0.50)),
		P90:  us(r.latencies.quantile(0.90)),
		P99:  us(r.latencies.quantile(0.99)),
		P999: us(r.latencies.quantile(0.999)),
		Max:  us(r.latencies.max),
	}
	if server != nil && r.answeredInTime > 0 {
		per := func(d time.Duration) float64 { return us(d) / float64(r.answeredInTime) }
		r.CPU = &cpu{User: per(server.User), Sys: per(server.System), Both: per(server.Total())}
	}
	r.Busy = own.Total().Seconds() / r.Seconds
}

func (r *result) writeJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(r)
}

func (r *result) writeText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "server   %s, %s, %d source ports, %.1f s\n", r.Server, r.Loop, r.Ports, r.Seconds)
	fmt.Fprintf(&b, "queries  %d sent, %d answered (%.0f/s), %d lost, %d mismatched, %d unexpected, %d refused, %d truncated\n",
		r.Sent, r.Answered, r.QPS, r.Lost, r.Mismatched, r.Unexpected, r.Refused, r.Truncated)
	b.WriteString("rcodes  ")
	for _, code := range slices.Sorted(maps.Keys(r.Rcodes)) {
		fmt.Fprintf(&b, " %s %d", code, r.Rcodes[code])
	}
	l := r.Latency
	fmt.Fprintf(&b, "\nlatency  us: mean %.1f, p50 %.1f, p90 %.1f, p99 %.1f, p99.9 %.1f, max %.1f\n",
		l.Mean, l.P50, l.P90, l.P99, l.P999, l.Max)
	if r.CPU != nil {
		fmt.Fprintf(&b, "cpu      server %.2f us/query (%.2f user + %.2f system)\n", r.CPU.Both, r.CPU.User, r.CPU.Sys)
	}
	fmt.Fprintf(&b, "         generator busy %.0f %% of the time\n", 100*r.Busy)
	_, err := io.WriteString(w, b.String())
	return err
}
