package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/iptables"
)

// Metrics of what the daemon does to the node, and knows of the cluster.

var (
	descSnapshotAge = desc("snapshot_age_seconds", "Time since the source of the cluster's objects was last heard, for the watch that has been silent longest.")
	descAwaited     = desc("service_awaited", "Whether the address of the cluster's DNS Service is needed and not known (1) or not (0).")
	descNodeInDoubt = desc("node_name_in_doubt", "Whether no pods of this node are seen, since its name is not known or another's (1), or not (0).")
	descStuck       = desc("stuck_readers_total", "Sockets closed because their reader stood still.")

	descActive      = desc("intercept_active", "Whether queries to the address are taken (1) or left to kube-proxy (0).", "address")
	descRepairs     = desc("intercept_repairs_total", "Times that rules or routes had been removed by others and were put back.")
	descWithdrawals = desc("intercept_withdrawals_total", "Times that an address was left to kube-proxy, each transport by itself.", "reason")
	descBypassed    = desc("intercept_bypassed_clients", "Clients that do not reach us and are let past.")

	descFlows       = desc("guard_flows", "Flows to watched Services at the last sweep, by the guard's verdict.", "verdict")
	descDeleted     = desc("guard_deleted_total", "Flows deleted.", "reason")
	descEarly       = desc("guard_deleted_early_total", "Flows deleted at the news, before the table was read, since the guard knew them.")
	descKnown       = desc("guard_known_flows", "Flows that are remembered, to be deleted at the news.")
	descRecreated   = desc("guard_recreated_total", "Flows that were made stale again after the news: kube-proxy's lag.")
	descRetired     = desc("guard_retired_sockets_total", "Upstream sockets of our own whose flow was deleted; their questions were asked again over others.")
	descRefused     = desc("guard_refused_total", "Deletions that the rate limit has put off.")
	descSweep       = desc("guard_sweep_duration_seconds", "Duration of a sweep.")
	descNewsToPurge = desc("guard_news_to_purge_seconds", "Time from news of an endpoint to the deletion of its flows.")
	descGuardErrors = desc("guard_errors_total", "Operations of the guard that failed.", "op")
	descGuardState  = desc("guard_state_info", "What the guard is doing; always 1.", "state")

	descCtEntries   = desc("conntrack_entries", "Entries in the connection tracking table.")
	descCtLimit     = desc("conntrack_limit", "The table's limit.")
	descCtInsert    = desc("conntrack_insert_failed_total", "Packets dropped because an entry for the same tuple was there already.")
	descCtEarlyDrop = desc("conntrack_early_drop_total", "Entries evicted because the table was full.")
)

// collectNode sends the metrics of interception, guard and cluster, as far as
// there are such.
func (d *daemon) collectNode(ch chan<- prometheus.Metric) {
	counter(ch, descStuck, d.resolver.Stats().Stuck)
	d.mu.Lock()
	icp := d.icp
	d.mu.Unlock()
	if icp != nil {
		collectIntercept(ch, icp.Stats())
	}
	if w := d.watcher(); w != nil {
		collectCluster(ch, w.Stats())
		gauge(ch, descAwaited, boolean(d.awaitsService()))
		gauge(ch, descNodeInDoubt, boolean(d.nodeInDoubt.Load()))
	}
	if g := d.guarding.Load(); g != nil {
		collectGuard(ch, g.guard.Stats())
		counter(ch, descRetired, d.retiredSockets.Load())
		if u, err := g.kernel.Usage(); err == nil {
			gauge(ch, descCtEntries, float64(u.Entries))
			gauge(ch, descCtLimit, float64(u.Limit))
			counter(ch, descCtInsert, u.InsertFailed)
			counter(ch, descCtEarlyDrop, u.EarlyDrop)
		}
	}
}

func collectIntercept(ch chan<- prometheus.Metric, s iptables.Stats) {
	for addr, active := range s.Active {
		gauge(ch, descActive, boolean(active), addr.String())
	}
	counter(ch, descRepairs, s.Repairs)
	for _, reason := range []string{iptables.ReasonSilent, reasonUpstream, reasonLeaving} {
		counter(ch, descWithdrawals, s.Withdrawals[reason], reason)
	}
	gauge(ch, descBypassed, float64(s.Bypassed))
}

func collectCluster(ch chan<- prometheus.Metric, s kube.Stats) {
	gauge(ch, descSnapshotAge, s.Age.Seconds())
}

func collectGuard(ch chan<- prometheus.Metric, s ctguard.Stats) {
	for _, v := range ctguard.Verdicts() {
		gauge(ch, descFlows, float64(s.Flows[v]), v.String())
	}
	for _, r := range ctguard.StaleReasons() {
		counter(ch, descDeleted, s.Deleted[r], r.String())
	}
	counter(ch, descEarly, s.DeletedEarly)
	gauge(ch, descKnown, float64(s.Known))
	counter(ch, descRecreated, s.Recreated)
	counter(ch, descRefused, s.Refused)
	guardHistogram(ch, descSweep, s.SweepDuration)
	guardHistogram(ch, descNewsToPurge, s.NewsToPurge)
	for _, op := range ctguard.Ops() {
		counter(ch, descGuardErrors, s.Errors[op], string(op))
	}
	gauge(ch, descGuardState, 1, s.State.String())
}

// guardHistogram sends a histogram that has no counts before its first one.
func guardHistogram(ch chan<- prometheus.Metric, d *prometheus.Desc, h ctguard.Histogram) {
	histogram(ch, d, h.Bounds, h.Counts, h.Sum)
}

// statusNode is the node's part of /statusz.
type statusNode struct {
	Intercept *statusIntercept `json:"intercept,omitempty"`
	Guard     *statusGuard     `json:"guard,omitempty"`
	Cluster   *statusCluster   `json:"cluster,omitempty"`
}

type statusIntercept struct {
	Backend     string            `json:"backend"`
	Reason      string            `json:"backendReason"`
	Active      map[string]bool   `json:"active"`
	Withdrawals map[string]uint64 `json:"withdrawals"`
	Repairs     uint64            `json:"repairs"`
	Bypassed    int               `json:"bypassedClients"`
	Foreign     []string          `json:"foreignRules"`
}

type statusGuard struct {
	State     string            `json:"state"`
	Message   string            `json:"message"`
	Flows     map[string]int    `json:"flows"`
	Deleted   map[string]uint64 `json:"deleted"`
	Recreated uint64            `json:"recreated"`
	LastSweep time.Time         `json:"lastSweep"`
	DryRun    bool              `json:"dryRun"`

	Idle     bool                `json:"idle"`       // message has the reason
	Silent   []string            `json:"silent"`     // endpoints that are believed dead
	Gone     int                 `json:"gone"`       // frontends that vanished not long ago
	Known    int                 `json:"knownFlows"` // that go at the news
	LeftOut  int                 `json:"leftOutFlows"`
	Early    uint64              `json:"deletedEarly"`
	Refused  uint64              `json:"refused"`
	Retired  uint64              `json:"retiredSockets"`
	Sweeps   uint64              `json:"sweeps"`
	Lost     uint64              `json:"eventsLost"` // each made up for by a sweep
	Errors   map[string]uint64   `json:"errors"`
	Evidence bool                `json:"evidence"`
	Kernel   ctguard.KernelStats `json:"kernel"`
}

type statusCluster struct {
	Synced  bool     `json:"synced"`
	Age     float64  `json:"ageSeconds"`
	Watches []string `json:"watches"`
	Pods    int      `json:"podAddresses"`
}

func (d *daemon) statusNode() statusNode {
	var s statusNode
	d.mu.Lock()
	icp := d.icp
	d.mu.Unlock()
	if icp != nil {
		st := icp.Stats()
		s.Intercept = &statusIntercept{
			Backend: string(st.Backend), Reason: st.Reason, Active: map[string]bool{}, Withdrawals: st.Withdrawals,
			Repairs: st.Repairs, Bypassed: st.Bypassed, Foreign: st.ForeignRules,
		}
		for addr, active := range st.Active {
			s.Intercept.Active[addr.String()] = active
		}
	}
	if g := d.guarding.Load(); g != nil {
		s.Guard = newStatusGuard(g.guard.Stats(), g.kernel.Stats(), d.config().Guard)
		s.Guard.Retired = d.retiredSockets.Load()
	}
	if w := d.watcher(); w != nil {
		st := w.Stats()
		s.Cluster = &statusCluster{Synced: st.Synced, Age: st.Age.Seconds()}
		for _, w := range st.Watches {
			text := w.Name
			if w.Err != nil {
				text += ": " + w.Err.Error()
			}
			s.Cluster.Watches = append(s.Cluster.Watches, text)
		}
		if c := d.cluster.Load(); c != nil {
			s.Cluster.Pods = len(c.Clients)
		}
	}
	return s
}

func newStatusGuard(st ctguard.Stats, kernel ctguard.KernelStats, cfg config.Guard) *statusGuard {
	g := &statusGuard{
		State: st.State.String(), Message: st.State.Message(), Idle: st.State.Idle(),
		Flows: map[string]int{}, Deleted: map[string]uint64{}, Errors: map[string]uint64{},
		Recreated: st.Recreated, LastSweep: st.LastSweep, Sweeps: st.Sweeps, DryRun: cfg.DryRun, Evidence: cfg.Evidence,
		Silent: []string{}, Gone: st.Gone, Known: st.Known, LeftOut: st.KnownLeftOut,
		Early: st.DeletedEarly, Refused: st.Refused, Lost: st.EventsLost, Kernel: kernel,
	}
	for v, n := range st.Flows {
		g.Flows[v.String()] = n
	}
	for r, n := range st.Deleted {
		g.Deleted[r.String()] = n
	}
	for op, n := range st.Errors {
		g.Errors[string(op)] = n
	}
	for _, at := range st.Silent {
		g.Silent = append(g.Silent, at.String())
	}
	return g
}
