package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// The incident's timing. Its three acts together stay under a minute.
const (
	incidentInterval = 250 * time.Millisecond // between two queries of a client
	// incidentTimeout is above the 1.8 s in which dnsguard promises an answer,
	// and below every libc's 5 s: it makes the outage look shorter, not longer.
	incidentTimeout = 2 * time.Second
	// The pod dies when the client's flow is an ASSURED stream of 120 s: that
	// takes a packet more than 2 s after the first.
	incidentKill = 3100 * time.Millisecond
	// kube-proxy 1.37 takes a deleted pod out of its rules in 0.08 to 0.15 s.
	incidentRules = incidentKill + 100*time.Millisecond
	incidentEnd   = 10 * time.Second
	incidentTick  = time.Second
	// With the guard alone the client is healed within the time that the news
	// take, and its next query: far below that.
	incidentHeal = 3 * time.Second
)

// incidentListen is the address that dnsguard has on the node beside the
// ClusterIP: the usual one of node-local caches.
const incidentListen = "169.254.20.10"

// incidentName is a Service name that nobody has asked for before.
func incidentName(client string) func(int) string {
	return func(seq int) string { return fmt.Sprintf("%s-%d.uncached.svc.cluster.local.", client, seq) }
}

// act is one run of the incident.
type act struct {
	story  *story
	title  string
	mode   mode   // what dnsguard does
	victim string // name of the DNS pod to kill; empty: the one that serves the pinned client

	lab    *Lab
	daemon *daemon // nil without dnsguard
	dns    []*DNSPod
	envoy  *Pod
	server netip.AddrPort // what the clients ask

	pinned, fresh Timeline
	reached       int // questions that DNS pods got from the clients, or on their behalf
}

// runIncident plays the outage without dnsguard, with its guard, and with all
// of it.
func runIncident(ctx context.Context, env *Env) error {
	s := &story{out: env.Out, colour: env.Colour}
	s.say("%s", s.paint(title, "The incident: a DNS pod dies under a client that keeps its source port."))
	s.say("A laboratory of network namespaces on this machine: a node, two DNS pods (stand-ins for CoreDNS)")
	s.say("behind 10.96.0.10 with kube-proxy's rules, and a client pod that asks there. Every query asks for a")
	s.say("name that nobody asked before, with TTL 0: no cache can help, each answer must come from a DNS pod.")
	acts := []*act{
		{title: "1. Without dnsguard."},
		{title: "2. With dnsguard's guard only: queries go as before, but flows to dead pods are deleted.", mode: guardOnly},
		{title: "3. With all of dnsguard: it takes the pod's queries and asks 10.96.0.10 itself.", mode: whole},
	}
	for _, a := range acts {
		a.story = s
		if a.mode == whole { // the client has no flow that would tell
			a.victim = acts[0].victim
		}
		if err := a.perform(ctx, env.Exe); err != nil {
			if ctx.Err() != nil {
				s.say("interrupted; the laboratory is gone")
			}
			return err
		}
	}
	s.chapter("Summary")
	summarise(s, acts)
	return judge(acts)
}

// perform builds a laboratory, plays the act and removes the laboratory again.
func (a *act) perform(ctx context.Context, exe string) (err error) {
	if a.lab, err = New(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.lab.Close()) }()
	a.server = a.lab.DNS.Addr(true)
	for _, pod := range []string{"dns-a", "dns-b"} {
		d, err := a.lab.AddDNS(ctx, pod, ClusterZone(), ExternalZone())
		if err != nil {
			return err
		}
		a.dns = append(a.dns, d)
	}
	if err := a.lab.DNS.SetEndpoints(Endpoints(a.dns...)...); err != nil {
		return err
	}
	if a.envoy, err = a.lab.AddPod("envoy"); err != nil {
		return err
	}
	a.story.chapter(a.title)
	if a.mode != absent {
		if a.daemon, err = startDaemon(ctx, exe, a.lab, a.mode); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.daemon.stop()) }()
		a.story.at(plain, "dnsguard", "runs on the node and is ready")
		a.story.start = time.Now()
	}
	return a.play(ctx)
}

// play runs the clients and, beside them, the events.
func (a *act) play(ctx context.Context) error {
	var tally tally
	pinned, err := NewPinnedClient(ctx, a.envoy.Namespace, ClientConfig{
		Server: a.server, Interval: incidentInterval, Timeout: incidentTimeout,
		Name: incidentName("envoy"), Observe: tally.observe(&tally.pinned),
	})
	if err != nil {
		return err
	}
	defer func() { _ = pinned.Close() }()
	fresh := NewFreshClient(a.envoy.Namespace, ClientConfig{
		Server: a.server, Interval: incidentInterval, Timeout: incidentTimeout,
		Name: incidentName("other"), Observe: tally.observe(&tally.fresh),
	})

	asking, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	clients.Go(func() { a.pinned = pinned.Run(asking) })
	clients.Go(func() { a.fresh = fresh.Run(asking) })
	defer func() { stop(); clients.Wait() }()
	a.story.at(plain, "envoy", "asks every %.2f s from one port for ever (%d); others ask from a new port each time",
		incidentInterval.Seconds(), pinned.Local.Port())

	if err := a.events(ctx, pinned.Local, &tally); err != nil {
		return err
	}
	stop()
	clients.Wait()
	a.tell(&tally)
	if length, over := a.pinned.LongestOutage(); length > 0 && over {
		a.story.at(good, "envoy", "was without an answer for %.1f s, and has been answered since", length.Seconds())
	}
	return a.checkOrigin()
}

// events kills the pod and changes the rules, each at its time, and tells how
// the clients fare.
func (a *act) events(ctx context.Context, client netip.AddrPort, tally *tally) error {
	kill, rules, end := time.NewTimer(incidentKill), time.NewTimer(incidentRules), time.NewTimer(incidentEnd)
	tick := time.NewTicker(incidentTick)
	defer func() { kill.Stop(); rules.Stop(); end.Stop(); tick.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			a.tell(tally)
		case <-kill.C:
			if err := a.kill(client); err != nil {
				return err
			}
		case <-rules.C:
			if err := a.lab.DNS.SetEndpoints(Endpoints(a.dns...)...); err != nil {
				return err
			}
			a.story.at(event, "kube-proxy", "the rules now name %s alone (%v)", a.dns[0].Name, a.dns[0].IP4)
			if a.daemon == nil {
				continue
			}
			if err := a.daemon.tell(Endpoints(a.dns...)...); err != nil {
				return err
			}
			a.story.at(event, "the API", "its EndpointSlice, too (here a file, which dnsguard looks at every 250 ms)")
		case <-end.C:
			return a.evidence(client)
		}
	}
}

// kill ends one DNS pod: the one that the kernel's flow of the pinned client
// leads to, unless a victim is named.
func (a *act) kill(client netip.AddrPort) error {
	served := func(d *DNSPod) bool { return d.Name == a.victim }
	if a.victim == "" {
		f, ok, err := a.lab.Node.FlowOf(client, a.server)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("no flow of %v to %v", client, a.server)
		}
		served = func(d *DNSPod) bool { return d.IP4 == f.Endpoint.Addr() }
	}
	i := slices.IndexFunc(a.dns, served)
	if i < 0 {
		return errors.New("no DNS pod serves the client")
	}
	dead := a.dns[i]
	a.story.at(event, dead.Name, "killed: its process and its network are gone (%v)", dead.IP4)
	a.victim = dead.Name
	a.dns = slices.Delete(slices.Clone(a.dns), i, i+1)
	return dead.Kill()
}

// evidence shows where the kernel's flow leads the client.
func (a *act) evidence(client netip.AddrPort) error {
	f, ok, err := a.lab.Node.FlowOf(client, a.lab.DNS.Addr(true))
	switch {
	case err != nil:
		return err
	case !ok:
		a.story.at(plain, "conntrack", "has no entry for envoy: its queries end on the node")
	case f.Endpoint.Addr() == a.dns[0].IP4:
		a.story.at(good, "conntrack", "%v -> %v leads to %v, which lives", f.Client, f.Frontend, f.Endpoint)
	default:
		a.story.at(bad, "conntrack", "%v -> %v still leads to %v; each query renews it (%.0f s left)",
			f.Client, f.Frontend, f.Endpoint, f.Timeout.Seconds())
	}
	return nil
}

// checkOrigin makes sure that every answer was a DNS pod's, as the story says,
// and counts what the pods were asked.
func (a *act) checkOrigin() error {
	asked := make(map[string]int)
	for _, d := range a.lab.dns {
		for q, n := range d.Server.Counts() {
			asked[q.Name] += n
		}
	}
	for _, o := range slices.Concat(a.pinned, a.fresh) {
		a.reached += asked[o.Name]
		if o.Err == nil && asked[o.Name] == 0 {
			return fmt.Errorf("%s was answered, but no DNS pod was asked for it", o.Name)
		}
	}
	return nil
}

// tell writes what the clients have seen since the last time.
func (a *act) tell(t *tally) {
	pinned, fresh := t.take()
	mood := plain
	if pinned.failed+fresh.failed > 0 {
		mood = bad
	}
	a.story.at(mood, "", "envoy: %-24s  new ports: %v", pinned, fresh)
}

// tally counts outcomes between two lines of the story.
type tally struct {
	mu            sync.Mutex
	pinned, fresh score
}

type score struct{ answered, failed int }

func (t *tally) observe(s *score) func(Outcome) {
	return func(o Outcome) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if o.Err == nil {
			s.answered++
		} else {
			s.failed++
		}
	}
}

func (t *tally) take() (pinned, fresh score) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pinned, fresh = t.pinned, t.fresh
	t.pinned, t.fresh = score{}, score{}
	return pinned, fresh
}

// String leaves out what did not happen.
func (s score) String() string {
	var parts []string
	if s.answered > 0 {
		parts = append(parts, fmt.Sprintf("%d answered", s.answered))
	}
	if s.failed > 0 {
		parts = append(parts, fmt.Sprintf("%d timed out", s.failed))
	}
	if len(parts) == 0 {
		return "waiting"
	}
	return strings.Join(parts, ", ")
}

// summarise writes the table.
func summarise(s *story, acts []*act) {
	row := func(label string, value func(*act) string) []string {
		cells := []string{label}
		for _, a := range acts {
			cells = append(cells, value(a))
		}
		return cells
	}
	count := func(n func(Timeline) int) func(*act) string {
		return func(a *act) string { return fmt.Sprint(n(a.pinned)) }
	}
	s.table([]string{"without dnsguard", "the guard only", "all of dnsguard"}, [][]string{
		row("envoy, one source port: queries", count(func(t Timeline) int { return len(t) })),
		row("  answered", count(Timeline.Answered)),
		row("  failed", count(Timeline.Failed)),
		row("  longest outage", func(a *act) string { return outage(a.pinned) }),
		row("  slowest answer", func(a *act) string {
			return fmt.Sprintf("%.1f ms", float64(a.pinned.Slowest())/float64(time.Millisecond))
		}),
		row("new source ports: answered", func(a *act) string {
			return fmt.Sprintf("%d of %d", a.fresh.Answered(), len(a.fresh))
		}),
		row("questions that reached a DNS pod", func(a *act) string { return fmt.Sprint(a.reached) }),
	})
}

// outage words the longest outage of a client.
func outage(t Timeline) string {
	length, over := t.LongestOutage()
	switch {
	case length == 0:
		return "none"
	case over:
		return fmt.Sprintf("%.1f s", length.Seconds())
	}
	return fmt.Sprintf("%.1f s, goes on", length.Seconds())
}

// judge says whether the story was true.
func judge(acts []*act) error {
	without, guarded, with := acts[0], acts[1], acts[2]
	if _, over := without.pinned.LongestOutage(); over {
		return fmt.Errorf("without dnsguard the outage did not show: %d of %d queries failed", without.pinned.Failed(), len(without.pinned))
	}
	if len(guarded.pinned) == 0 || len(with.pinned) == 0 || len(with.fresh) == 0 {
		return errors.New("with dnsguard nothing was asked")
	}
	if length, over := guarded.pinned.LongestOutage(); !over || length > incidentHeal {
		return fmt.Errorf("with the guard the client was not healed: %s without an answer", outage(guarded.pinned))
	}
	if failed := with.pinned.Failed() + with.fresh.Failed(); failed > 0 {
		return fmt.Errorf("with dnsguard %d queries failed", failed)
	}
	return nil
}
