package main

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dnsguard/dnsguard/resolver"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// status is what /statusz shows. Its JSON is stable: fields are added, not
// renamed.
type status struct {
	Version   string           `json:"version"`
	Uptime    float64          `json:"uptimeSeconds"`
	Ready     bool             `json:"ready"`
	Reasons   []string         `json:"reasons"`
	Warnings  []string         `json:"warnings"`
	Config    string           `json:"configHash"`
	Listen    []string         `json:"listen"`
	Queries   statusQueries    `json:"queries"`
	Cache     statusCache      `json:"cache"`
	Upstreams []statusUpstream `json:"upstreams"`
	Walks     statusWalks      `json:"search"`
	Memory    statusMemory     `json:"memory"`
	statusNode
}

type statusQueries struct {
	UDP        uint64            `json:"udp"`
	TCP        uint64            `json:"tcp"`
	Hits       map[string]uint64 `json:"hits"`
	Misses     uint64            `json:"misses"`
	Prefetches uint64            `json:"prefetches"`
	Shed       map[string]uint64 `json:"shed"`
	Dropped    uint64            `json:"socketDrops"`
	InFlight   int               `json:"inFlight"`
	Waiters    int               `json:"waiters"`
	Conns      int               `json:"tcpConnections"`
}

type statusCache struct {
	Entries   int    `json:"entries"`
	Bytes     int64  `json:"bytes"`
	Size      int64  `json:"sizeBytes"`
	Evictions uint64 `json:"evictions"`
}

type statusUpstream struct {
	Server    string  `json:"server"`
	Transport string  `json:"transport"`
	Up        bool    `json:"up"`
	RTT       float64 `json:"rttSeconds"`
	Queries   uint64  `json:"queries"`
	Failures  uint64  `json:"failures"`
	Hedges    uint64  `json:"hedges"`
	Retries   uint64  `json:"retries"`
	InFlight  int     `json:"inFlight"`
	Sockets   int     `json:"sockets"`
}

type statusWalks struct {
	Walks map[string]uint64 `json:"walks"` // by kind/result
	Saved uint64            `json:"questionsSaved"`
}

type statusMemory struct {
	HeapBytes  uint64 `json:"heapBytes"`
	Goroutines int    `json:"goroutines"`
}

// status gathers the facts.
func (d *daemon) status() *status {
	rs, cs, us := d.resolver.Stats(), d.cache.Stats(), d.upstreamStats()
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	s := &status{
		Version: version, Uptime: time.Since(d.started).Seconds(), Config: d.config().Hash(),
		Queries: statusQueries{
			UDP: rs.Queries[resolver.UDP], TCP: rs.Queries[resolver.TCP],
			Hits: map[string]uint64{}, Misses: rs.Misses, Prefetches: rs.Prefetches, Shed: map[string]uint64{},
			InFlight: rs.InFlight, Waiters: rs.Waiters, Conns: rs.Conns,
		},
		Cache:  statusCache{Entries: cs.Entries(), Bytes: cs.Bytes, Size: cs.Size, Evictions: cs.Evictions()},
		Walks:  statusWalks{Walks: map[string]uint64{}, Saved: rs.Saved},
		Memory: statusMemory{HeapBytes: mem.HeapAlloc, Goroutines: runtime.NumGoroutine()},
	}
	s.statusNode = d.statusNode()
	s.Reasons, s.Warnings = d.conditions.get()
	s.Ready = len(s.Reasons) == 0
	for _, a := range d.listening() {
		s.Listen = append(s.Listen, a.String())
	}
	for kind, n := range rs.Hits {
		s.Queries.Hits[resolver.Hit(kind).String()] = n //nolint:gosec // an index
	}
	for reason, n := range rs.Shed {
		s.Queries.Shed[resolver.Shed(reason).String()] = n //nolint:gosec // an index
	}
	for _, drops := range rs.Drops {
		s.Queries.Dropped += drops.Drops
	}
	for kind := range rs.Walks {
		for result, n := range rs.Walks[kind] {
			s.Walks.Walks[resolver.WalkKind(kind).String()+"/"+resolver.WalkResult(result).String()] = n //nolint:gosec // indexes
		}
	}
	for i := range us.Paths {
		s.Upstreams = append(s.Upstreams, upstreamStatus(&us.Paths[i]))
	}
	return s
}

func upstreamStatus(p *upstream.PathStats) statusUpstream {
	u := statusUpstream{
		Server: p.Server.String(), Transport: p.Transport.String(), Up: p.Up, RTT: p.RTT.Seconds(),
		Queries: p.Queries, Hedges: p.Hedges, Retries: p.Retries, InFlight: p.InFlight, Sockets: p.Sockets,
	}
	for _, n := range p.Failures {
		u.Failures += n
	}
	return u
}

// write prints the status for a person.
func (s *status) write(out io.Writer) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer func() { _ = w.Flush() }()
	line := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("version", "%s", s.Version)
	line("up for", "%v", (time.Duration(s.Uptime) * time.Second))
	line("ready", "%v", s.Ready)
	for _, r := range s.Reasons {
		line("", "%s", r)
	}
	for _, warning := range s.Warnings {
		line("warning", "%s", warning)
	}
	line("configuration", "%s", s.Config)
	for _, a := range s.Listen {
		line("listen", "%s", a)
	}
	fmt.Fprintln(w)
	q := &s.Queries
	line("queries", "%d over UDP, %d over TCP", q.UDP, q.TCP)
	line("hits", "%s", counts(q.Hits))
	line("misses", "%d, and %d prefetches", q.Misses, q.Prefetches)
	line("in flight", "%d questions, %d queries waiting, %d TCP connections", q.InFlight, q.Waiters, q.Conns)
	line("shed", "%s", counts(q.Shed))
	line("socket drops", "%d", q.Dropped)
	line("cache", "%d entries, %d of %d bytes, %d evicted", s.Cache.Entries, s.Cache.Bytes, s.Cache.Size, s.Cache.Evictions)
	line("search walks", "%s, %d questions saved", counts(s.Walks.Walks), s.Walks.Saved)
	line("memory", "%d bytes of heap, %d goroutines", s.Memory.HeapBytes, s.Memory.Goroutines)
	s.writeNode(line)
	fmt.Fprintln(w)
	fmt.Fprintln(w, "upstream\t\tstate\tround trip\tqueries\tfailures\thedges\tretries\tin flight\tsockets")
	for _, u := range s.Upstreams {
		state := "up"
		if !u.Up {
			state = "down"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%v\t%d\t%d\t%d\t%d\t%d\t%d\n", u.Server, u.Transport, state,
			time.Duration(u.RTT*float64(time.Second)).Round(time.Microsecond), u.Queries, u.Failures, u.Hedges, u.Retries, u.InFlight, u.Sockets)
	}
}

// writeNode prints the node's part.
func (s *status) writeNode(line func(name, format string, args ...any)) {
	if i := s.Intercept; i != nil {
		line("interception", "%s (%s), %d repairs, %d clients let past, withdrawn: %s", i.Backend, i.Reason, i.Repairs, i.Bypassed, counts(i.Withdrawals))
		for _, addr := range slices.Sorted(maps.Keys(i.Active)) {
			state := "taken"
			if !i.Active[addr] {
				state = "left to kube-proxy"
			}
			line("", "%s is %s", addr, state)
		}
	}
	if s.Guard != nil {
		s.Guard.write(line)
	}
	if c := s.Cluster; c != nil {
		line("cluster", "heard %v ago, synced %v, %d pod addresses", time.Duration(c.Age*float64(time.Second)).Round(time.Second), c.Synced, c.Pods)
		for _, watch := range c.Watches {
			line("", "%s", watch)
		}
	}
}

// write prints the guard's part.
func (g *statusGuard) write(line func(name, format string, args ...any)) {
	message := g.Message
	if g.Idle {
		message = "idle: " + message
	}
	for _, mode := range []struct {
		on   bool
		name string
	}{{g.DryRun, "dry run"}, {g.Evidence, "with evidence"}} {
		if mode.on {
			message += " (" + mode.name + ")"
		}
	}
	line("guard", "%s", message)
	line("", "flows %d live, %d held, %d stale; %d known, %d left out", g.Flows["live"], g.Flows["held"], g.Flows["stale"], g.Known, g.LeftOut)
	line("", "deleted: %s", counts(g.Deleted))
	line("", "%d deleted at the news, %d re-created, %d put off; %d sockets of our own retired", g.Early, g.Recreated, g.Refused, g.Retired)
	if len(g.Silent) > 0 {
		line("", "believed dead: %s", strings.Join(g.Silent, ", "))
	}
	if g.Gone > 0 {
		line("", "%d frontends vanished not long ago", g.Gone)
	}
	if len(g.Errors) > 0 {
		line("", "errors: %s", counts(g.Errors))
	}
	swept := "never"
	if !g.LastSweep.IsZero() {
		swept = g.LastSweep.Format(time.RFC3339)
	}
	line("", "%d sweeps, the last %s; events lost %d times", g.Sweeps, swept, g.Lost)
	k := &g.Kernel
	filters := "filters dumps and deletions as far as is known"
	switch {
	case k.NoDumpFilter && k.NoDeleteFilter:
		filters = "filters nothing"
	case k.NoDumpFilter:
		filters = "does not filter dumps"
	case k.NoDeleteFilter:
		filters = "filters dumps, not deletions"
	}
	line("", "the kernel %s; %d dumps, %d of them interrupted, %d messages, %d bytes", filters, k.Dumps, k.Interrupted, k.Messages, k.Bytes)
}

// counts prints named counts in the order of their names.
func counts(m map[string]uint64) string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, m[name])
	}
	return strings.Join(names, ", ")
}
