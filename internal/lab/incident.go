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

// The incident's timing. Both halves together stay under half a minute.
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
)

// incidentListen is the address of the resolver on the node, the usual one of
// node-local caches.
const incidentListen = "169.254.20.10"

// incidentName is a Service name that nobody has asked for before.
func incidentName(client string) func(int) string {
	return func(seq int) string { return fmt.Sprintf("%s-%d.uncached.svc.cluster.local.", client, seq) }
}

// half is one of the two runs of the incident.
type half struct {
	story  *story
	lab    *Lab
	dns    []*DNSPod
	envoy  *Pod
	server netip.AddrPort // what the clients ask
	victim string         // name of the DNS pod to kill; empty: the one that serves the pinned client

	pinned, fresh Timeline
	reached       int // questions that DNS pods got from the clients, or on their behalf
}

// runIncident plays the outage without dnsguard and with it.
func runIncident(ctx context.Context, env *Env) error {
	s := &story{out: env.Out, colour: env.Colour}
	s.say("%s", s.paint(title, "The incident: a DNS pod dies under a client that keeps its source port."))
	s.say("A laboratory of network namespaces on this machine: a node, two DNS pods (stand-ins for CoreDNS)")
	s.say("behind 10.96.0.10 with kube-proxy's rules, and a client pod. Every query asks for a name that nobody")
	s.say("asked before, with TTL 0: no cache can help, each answer must come from a DNS pod.")

	without, err := playHalf(ctx, s, "1. Without dnsguard: the pod asks 10.96.0.10 through kube-proxy's rules.", "", "")
	if err == nil {
		var with *half
		if with, err = playHalf(ctx, s, "2. With dnsguard on the node: the pod asks 169.254.20.10, dnsguard asks 10.96.0.10.", without.victim, env.Exe); err == nil {
			s.chapter("Summary")
			summarise(s, without, with)
			return judge(without, with)
		}
	}
	if ctx.Err() != nil {
		s.say("interrupted; the laboratory is gone")
	}
	return err
}

// playHalf builds a laboratory, plays one half of the incident and removes the
// laboratory again. exe is empty for the half without dnsguard.
func playHalf(ctx context.Context, s *story, name, victim, exe string) (h *half, err error) {
	l, err := New()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	h = &half{story: s, lab: l, server: l.DNS.Addr(true), victim: victim}
	for _, pod := range []string{"dns-a", "dns-b"} {
		d, err := l.AddDNS(ctx, pod, ClusterZone(), ExternalZone())
		if err != nil {
			return nil, err
		}
		h.dns = append(h.dns, d)
	}
	if err := l.DNS.SetEndpoints(Endpoints(h.dns...)...); err != nil {
		return nil, err
	}
	if h.envoy, err = l.AddPod("envoy"); err != nil {
		return nil, err
	}
	s.chapter(name)
	if exe != "" {
		listen := netip.MustParseAddr(incidentListen)
		d, err := startDaemon(ctx, exe, l, listen, h.envoy, incidentName("start")(0))
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, d.stop()) }()
		h.server = netip.AddrPortFrom(listen, dnsPort)
		s.at(plain, "dnsguard", "runs on the node and answers on %v", h.server)
		s.start = time.Now()
	}
	return h, h.play(ctx)
}

// play runs the clients and, beside them, the events.
func (h *half) play(ctx context.Context) error {
	var tally tally
	pinned, err := NewPinnedClient(ctx, h.envoy.Namespace, ClientConfig{
		Server: h.server, Interval: incidentInterval, Timeout: incidentTimeout,
		Name: incidentName("envoy"), Observe: tally.observe(&tally.pinned),
	})
	if err != nil {
		return err
	}
	defer func() { _ = pinned.Close() }()
	fresh := NewFreshClient(h.envoy.Namespace, ClientConfig{
		Server: h.server, Interval: incidentInterval, Timeout: incidentTimeout,
		Name: incidentName("other"), Observe: tally.observe(&tally.fresh),
	})

	asking, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	clients.Go(func() { h.pinned = pinned.Run(asking) })
	clients.Go(func() { h.fresh = fresh.Run(asking) })
	defer func() { stop(); clients.Wait() }()
	h.story.at(plain, "envoy", "asks every %.2f s from one port for ever (%d); others ask from a new port each time",
		incidentInterval.Seconds(), pinned.Local.Port())

	if err := h.events(ctx, pinned.Local, &tally); err != nil {
		return err
	}
	stop()
	clients.Wait()
	h.tell(&tally)
	return h.checkOrigin()
}

// events kills the pod and changes the rules, each at its time, and tells how
// the clients fare.
func (h *half) events(ctx context.Context, client netip.AddrPort, tally *tally) error {
	kill, rules, end := time.NewTimer(incidentKill), time.NewTimer(incidentRules), time.NewTimer(incidentEnd)
	tick := time.NewTicker(incidentTick)
	defer func() { kill.Stop(); rules.Stop(); end.Stop(); tick.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			h.tell(tally)
		case <-kill.C:
			if err := h.kill(client); err != nil {
				return err
			}
		case <-rules.C:
			if err := h.lab.DNS.SetEndpoints(Endpoints(h.dns...)...); err != nil {
				return err
			}
			h.story.at(event, "kube-proxy", "the rules now name %s alone (%v)", h.dns[0].Name, h.dns[0].IP4)
		case <-end.C:
			return h.evidence(client)
		}
	}
}

// kill ends one DNS pod: the one that the kernel's flow of the pinned client
// leads to, unless a victim is named.
func (h *half) kill(client netip.AddrPort) error {
	served := func(d *DNSPod) bool { return d.Name == h.victim }
	if h.victim == "" {
		f, ok, err := h.lab.Node.FlowOf(client, h.server)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("no flow of %v to %v", client, h.server)
		}
		served = func(d *DNSPod) bool { return d.IP4 == f.Endpoint.Addr() }
	}
	i := slices.IndexFunc(h.dns, served)
	if i < 0 {
		return errors.New("no DNS pod serves the client")
	}
	dead := h.dns[i]
	h.story.at(event, dead.Name, "killed: its process and its network are gone (%v)", dead.IP4)
	h.victim = dead.Name
	h.dns = slices.Delete(slices.Clone(h.dns), i, i+1)
	return dead.Kill()
}

// evidence shows the kernel's flow that keeps the client at the dead pod.
func (h *half) evidence(client netip.AddrPort) error {
	f, ok, err := h.lab.Node.FlowOf(client, h.lab.DNS.Addr(true))
	if err != nil || !ok || f.Endpoint.Addr() == h.dns[0].IP4 {
		return err
	}
	h.story.at(bad, "conntrack", "%v -> %v still leads to %v; each query renews it (%.0f s left)",
		f.Client, f.Frontend, f.Endpoint, f.Timeout.Seconds())
	return nil
}

// checkOrigin makes sure that every answer was a DNS pod's, as the story says,
// and counts what the pods were asked.
func (h *half) checkOrigin() error {
	asked := make(map[string]int)
	for _, d := range h.lab.dns {
		for q, n := range d.Server.Counts() {
			asked[q.Name] += n
		}
	}
	for _, o := range slices.Concat(h.pinned, h.fresh) {
		h.reached += asked[o.Name]
		if o.Err == nil && asked[o.Name] == 0 {
			return fmt.Errorf("%s was answered, but no DNS pod was asked for it", o.Name)
		}
	}
	return nil
}

// tell writes what the clients have seen since the last time.
func (h *half) tell(t *tally) {
	pinned, fresh := t.take()
	mood := plain
	if pinned.failed+fresh.failed > 0 {
		mood = bad
	}
	h.story.at(mood, "", "envoy: %-24s  new ports: %v", pinned, fresh)
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
func summarise(s *story, without, with *half) {
	row := func(label string, value func(*half) string) [3]string {
		return [3]string{label, value(without), value(with)}
	}
	count := func(n func(Timeline) int) func(*half) string {
		return func(h *half) string { return fmt.Sprint(n(h.pinned)) }
	}
	s.table([2]string{"without dnsguard", "with dnsguard"}, [][3]string{
		row("envoy, one source port: queries", count(func(t Timeline) int { return len(t) })),
		row("  answered", count(Timeline.Answered)),
		row("  failed", count(Timeline.Failed)),
		row("  longest outage", func(h *half) string { return outage(h.pinned) }),
		row("  slowest answer", func(h *half) string {
			return fmt.Sprintf("%.1f ms", float64(h.pinned.Slowest())/float64(time.Millisecond))
		}),
		row("new source ports: answered", func(h *half) string {
			return fmt.Sprintf("%d of %d", h.fresh.Answered(), len(h.fresh))
		}),
		row("questions that reached a DNS pod", func(h *half) string { return fmt.Sprint(h.reached) }),
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
func judge(without, with *half) error {
	if _, over := without.pinned.LongestOutage(); over {
		return fmt.Errorf("without dnsguard the outage did not show: %d of %d queries failed", without.pinned.Failed(), len(without.pinned))
	}
	if len(with.pinned) == 0 || len(with.fresh) == 0 {
		return errors.New("with dnsguard nothing was asked")
	}
	if failed := with.pinned.Failed() + with.fresh.Failed(); failed > 0 {
		return fmt.Errorf("with dnsguard %d queries failed", failed)
	}
	return nil
}
