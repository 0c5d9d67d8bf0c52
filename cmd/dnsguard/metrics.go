package main

import (
	"runtime"
	"strconv"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/cache"
)

// newRegistry returns a registry with all metrics of the daemon.
func newRegistry(d *daemon) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&collector{d},
	)
	return r
}

// collector turns the Stats of all parts into metrics when it is scraped: what
// is counted on the query path is counted there without a library.
type collector struct{ d *daemon }

// desc makes the description of a metric.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dnsguard_"+name, help, labels, nil)
}

var (
	descBuildInfo  = desc("build_info", "The version, as labels; always 1.", "version", "goversion")
	descConfigHash = desc("config_hash_info", "The configuration in use, by its hash; always 1.", "hash")
	descReloads    = desc("config_reloads_total", "Configurations that were taken over or refused.", "result")
	descWaits      = desc("config_restart_required", "Whether the latest configuration waits for a restart (1) or not (0).")
	descReady      = desc("ready", "Whether the process is ready (1) or not (0).")

	descQueries   = desc("queries_total", "Queries received.", "transport")
	descResponses = desc("responses_total", "Answers given.", "rcode")
	descDropped   = desc("dropped_total", "Datagrams and frames that deserved no answer: shorter than a header, or answers themselves.")
	descDuration  = desc("query_duration_seconds", "Time from a query's reading to its answer's sending.")
	descShed      = desc("shed_total", "Queries answered SERVFAIL, and connections closed, for want of room.", "reason")
	descInFlight  = desc("in_flight", "Questions under way to upstreams.")
	descWaiters   = desc("waiters", "Queries that wait for a question under way.")
	descConns     = desc("tcp_connections", "TCP connections of clients.")
	descDrops     = desc("socket_drops_total", "Datagrams that the kernel dropped because a receive buffer was full.", "address")
	descSendErrs  = desc("send_errors_total", "Answers that the kernel refused to send.")

	descHits       = desc("cache_hits_total", "Queries answered from the cache.", "kind")
	descMisses     = desc("cache_misses_total", "Queries that the cache could not answer.")
	descPrefetches = desc("prefetches_total", "Entries renewed before they expired.")
	descEntries    = desc("cache_entries", "Answers in the cache, fresh and expired.")
	descBytes      = desc("cache_bytes", "Memory that the cache takes of its budget, in bytes.")
	descLimit      = desc("cache_limit_bytes", "The cache's budget, in bytes.")
	descEvictions  = desc("cache_evictions_total", "Answers evicted for want of room.")

	descWalks = desc("search_walks_total", "Search-list walks finished for clients.", "kind", "result")
	descSaved = desc("search_saved_total", "Questions that answers of finished walks spared clients.")
)

// Describe sends nothing: the set of metrics depends on what there is (an
// unchecked collector).
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends all metrics.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	d := c.d
	d.mu.Lock()
	hash := d.cfg.Hash()
	reloads := map[string]uint64{"success": d.reloads["success"], "failure": d.reloads["failure"]}
	d.mu.Unlock()
	reasons, _ := d.conditions.get()
	gauge(ch, descBuildInfo, 1, version, runtime.Version())
	gauge(ch, descConfigHash, 1, hash)
	for result, n := range reloads {
		counter(ch, descReloads, n, result)
	}
	gauge(ch, descWaits, boolean(d.configWaits.Load()))
	gauge(ch, descReady, boolean(len(reasons) == 0))
	collectResolver(ch, d.resolver.Stats())
	collectCache(ch, d.cache.Stats())
	collectUpstream(ch, d.upstreamStats())
	d.collectNode(ch)
}

func collectResolver(ch chan<- prometheus.Metric, s resolver.Stats) {
	for t, n := range s.Queries {
		counter(ch, descQueries, n, resolver.Transport(t).String()) //nolint:gosec // an index
	}
	for rcode, n := range s.Responses {
		name, ok := dns.RcodeToString[rcode]
		switch {
		case rcode == dns.RcodeBadVers:
			name = "BADVERS" // miekg/dns has BADSIG under the same number
		case !ok:
			name = strconv.Itoa(rcode)
		}
		if n > 0 || rcode <= dns.RcodeRefused {
			counter(ch, descResponses, n, name)
		}
	}
	counter(ch, descDropped, s.Dropped)
	histogram(ch, descDuration, s.Duration.Bounds, s.Duration.Counts, s.Duration.Sum)
	for reason, n := range s.Shed {
		counter(ch, descShed, n, resolver.Shed(reason).String()) //nolint:gosec // an index
	}
	gauge(ch, descInFlight, float64(s.InFlight))
	gauge(ch, descWaiters, float64(s.Waiters))
	gauge(ch, descConns, float64(s.Conns))
	for _, drops := range s.Drops {
		counter(ch, descDrops, drops.Drops, drops.Address)
	}
	counter(ch, descSendErrs, s.SendErrors)
	for kind, n := range s.Hits {
		counter(ch, descHits, n, resolver.Hit(kind).String()) //nolint:gosec // an index
	}
	counter(ch, descMisses, s.Misses)
	counter(ch, descPrefetches, s.Prefetches)
	for kind := range s.Walks {
		for result, n := range s.Walks[kind] {
			counter(ch, descWalks, n, resolver.WalkKind(kind).String(), resolver.WalkResult(result).String()) //nolint:gosec // indexes
		}
	}
	counter(ch, descSaved, s.Saved)
}

func collectCache(ch chan<- prometheus.Metric, s cache.Stats) {
	gauge(ch, descEntries, float64(s.Entries()))
	gauge(ch, descBytes, float64(s.Bytes))
	gauge(ch, descLimit, float64(s.Size))
	counter(ch, descEvictions, s.Evictions())
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, n uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

// histogram sends a histogram of durations whose counts are by bucket, the last
// being above all bounds.
func histogram(ch chan<- prometheus.Metric, d *prometheus.Desc, bounds []time.Duration, counts []uint64, sum time.Duration, labels ...string) {
	buckets := make(map[float64]uint64, len(bounds))
	total := uint64(0)
	for i, n := range counts {
		total += n
		if i < len(bounds) {
			buckets[bounds[i].Seconds()] = total
		}
	}
	ch <- prometheus.MustNewConstHistogram(d, total, sum.Seconds(), buckets, labels...)
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
