package main

import (
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// upstreamStats returns the counts of all forwarders since the start: of the
// one in use, and of those that reloads have replaced.
func (d *daemon) upstreamStats() upstream.Stats {
	d.mu.Lock()
	f, leaving, s := d.forwarder, slices.Clone(d.leaving), d.retired
	s.Paths = slices.Clone(s.Paths)
	d.mu.Unlock()
	for _, l := range leaving {
		s = addUpstream(s, l.Stats())
	}
	if f == nil {
		return s
	}
	return addUpstream(f.Stats(), s)
}

// addUpstream adds the counters of old to s, whose gauges stay.
func addUpstream(s, old upstream.Stats) upstream.Stats {
	type pathKey struct {
		server    netip.AddrPort
		transport upstream.Transport
	}
	index := map[pathKey]int{}
	for i := range s.Paths {
		index[pathKey{s.Paths[i].Server, s.Paths[i].Transport}] = i
	}
	for _, p := range old.Paths {
		key := pathKey{p.Server, p.Transport}
		i, ok := index[key]
		if !ok {
			i = len(s.Paths)
			index[key] = i
			s.Paths = append(s.Paths, upstream.PathStats{Server: p.Server, Transport: p.Transport, Up: p.Up, EDNS: p.EDNS})
		}
		to := &s.Paths[i]
		to.Queries += p.Queries
		to.Hedges += p.Hedges
		to.Retries += p.Retries
		to.Resends += p.Resends
		to.Probes += p.Probes
		to.Fallbacks += p.Fallbacks
		to.Late += p.Late
		to.Opened += p.Opened
		for i := range to.Failures {
			to.Failures[i] += p.Failures[i]
		}
		for i := range to.Wrong {
			to.Wrong[i] += p.Wrong[i]
		}
		for i := range to.Latency.Buckets {
			to.Latency.Buckets[i] += p.Latency.Buckets[i]
		}
		to.Latency.Sum += p.Latency.Sum
	}
	for i := range s.Denied {
		s.Denied[i] += old.Denied[i]
	}
	return s
}

// upstreamAnswers returns how many answers upstreams have given, of every kind.
func (d *daemon) upstreamAnswers() (sum uint64) {
	for _, p := range d.upstreamStats().Paths {
		for _, n := range p.Latency.Buckets {
			sum += n
		}
	}
	return sum
}

var (
	descUpQueries   = desc("upstream_queries_total", "Queries sent upstream, all kinds together.", "upstream", "transport")
	descUpFailures  = desc("upstream_failures_total", "Queries sent upstream that came to nothing.", "upstream", "reason")
	descUpDuration  = desc("upstream_duration_seconds", "Time from a query's sending to its answer, answers of every kind.", "upstream")
	descUpHedges    = desc("upstream_hedges_total", "Queries sent a second time because the first was slow.")
	descUpRetries   = desc("upstream_retries_total", "Queries sent a second time because the first was not answered.")
	descUpResends   = desc("upstream_resends_total", "Queries sent again because their socket led nowhere: refused, or its flow deleted.")
	descUpFallbacks = desc("upstream_tcp_fallbacks_total", "Truncated answers fetched whole over TCP.")
	descUpBudget    = desc("upstream_budget_exhausted_total", "Second queries that the budget refused.", "kind")
	descUpUp        = desc("upstream_up", "Whether the server is asked over the transport (1), or only tried now and then (0).", "upstream", "transport")
	descUpWrong     = desc("upstream_wrong_answers_total", "Messages that were not the answer waited for.", "upstream", "reason")
	descUpRTT       = desc("upstream_rtt_seconds", "Smoothed round-trip time.", "upstream", "transport")
)

func collectUpstream(ch chan<- prometheus.Metric, s upstream.Stats) {
	bounds := upstream.LatencyBounds()
	var hedges, retries, resends, fallbacks uint64
	// UDP and TCP of one server are one series where the contract has no
	// label for the transport.
	for i := 0; i < len(s.Paths); {
		server := s.Paths[i].Server
		name := server.String()
		var failures [len(s.Paths[i].Failures)]uint64
		var wrong [len(s.Paths[i].Wrong)]uint64
		var latency upstream.Histogram
		for ; i < len(s.Paths) && s.Paths[i].Server == server; i++ {
			p := &s.Paths[i]
			counter(ch, descUpQueries, p.Queries, name, p.Transport.String())
			gauge(ch, descUpUp, boolean(p.Up), name, p.Transport.String())
			gauge(ch, descUpRTT, p.RTT.Seconds(), name, p.Transport.String())
			hedges += p.Hedges
			retries += p.Retries
			resends += p.Resends
			fallbacks += p.Fallbacks
			for r, n := range p.Failures {
				failures[r] += n
			}
			for w, n := range p.Wrong {
				wrong[w] += n
			}
			for b, n := range p.Latency.Buckets {
				latency.Buckets[b] += n
			}
			latency.Sum += p.Latency.Sum
		}
		for r, n := range failures {
			counter(ch, descUpFailures, n, name, upstream.Reason(r).String()) //nolint:gosec // an index
		}
		for w, n := range wrong {
			counter(ch, descUpWrong, n, name, upstream.Wrong(w).String()) //nolint:gosec // an index
		}
		histogram(ch, descUpDuration, bounds[:], latency.Buckets[:], latency.Sum, name)
	}
	counter(ch, descUpHedges, hedges)
	counter(ch, descUpRetries, retries)
	counter(ch, descUpResends, resends)
	counter(ch, descUpFallbacks, fallbacks)
	for k, n := range s.Denied {
		counter(ch, descUpBudget, n, upstream.Kind(k).String()) //nolint:gosec // an index
	}
}
