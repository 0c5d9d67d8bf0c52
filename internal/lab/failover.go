package lab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// The load of the failover scenarios: half of it from ports that stay, as
// Envoy's, and half from a new port for each query, as libc's.
const (
	failoverRate    = 2000 // queries a second
	failoverSockets = 4
	failoverTimeout = time.Second // after which a query is lost
	failoverName    = "www.example.com."
	failoverTick    = time.Second
	// failoverDeath is how long a process may take to die. It is a matter of
	// milliseconds where its threads do not have to wait for a CPU.
	failoverDeath = 300 * time.Millisecond
	// failoverAlive is intercept.aliveTimeout, and as much as a busy machine
	// may add to it.
	failoverAlive = 1500 * time.Millisecond
)

// failover is a scenario in which something happens to dnsguard under load.
type failover struct {
	title   string
	events  []happening
	length  time.Duration
	verdict func(*stage) error
}

// happening is one event at its time.
type happening struct {
	at time.Duration
	do func(context.Context, *stage) error
}

// stage is what such a scenario plays on.
type stage struct {
	story   *story
	exe     string
	lab     *Lab
	dns     []*DNSPod
	client  *Pod
	daemons []*daemon // in the order of their start, with those that have ended
	hung    *daemon

	reached map[*daemon]int // queries that were seen to have reached each
	served  int             // queries that had reached the DNS pods at the last look
	taken   []reach         // what has reached whom, between two events
	fixed   *LoadResult
	fresh   *LoadResult
}

// reach counts queries by whom they reached.
type reach struct{ guard, pods int }

func (r *reach) add(o reach) { r.guard, r.pods = r.guard+o.guard, r.pods+o.pods }

// runKill ends the process under load, and starts another.
func runKill(ctx context.Context, env *Env) error {
	return failover{
		title:  "dnsguard is killed (kill -9) and started again two seconds later.",
		length: 7 * time.Second,
		events: []happening{
			{2 * time.Second, func(_ context.Context, s *stage) error {
				s.story.at(event, "dnsguard", "killed; the kernel removes its rules with it")
				return s.kill()
			}},
			{4 * time.Second, func(ctx context.Context, s *stage) error { return s.start(ctx) }},
		},
		verdict: func(s *stage) error {
			if gap := s.gap(); gap > failoverDeath {
				return fmt.Errorf("no answer for %v", gap)
			}
			s.story.at(good, "", "those lost were in the dying process's hands; the DNS pods answered until the next one was there")
			return s.judge(byGuard, byPods, byGuard)
		},
	}.run(ctx, env)
}

// runHang stops the process under load, and lets it go on.
func runHang(ctx context.Context, env *Env) error {
	return failover{
		title:  "dnsguard hangs (SIGSTOP) for three seconds.",
		length: 8 * time.Second,
		events: []happening{
			{2 * time.Second, func(_ context.Context, s *stage) error {
				s.story.at(event, "dnsguard", "stopped: it answers nothing; its rules hold for one second after its last answer")
				s.hung = s.last()
				return s.signal(syscall.SIGSTOP)
			}},
			// Until the rules let go, neither is asked.
			{2*time.Second + failoverAlive, func(context.Context, *stage) error { return nil }},
			{5 * time.Second, func(_ context.Context, s *stage) error {
				s.story.at(event, "dnsguard", "goes on")
				s.hung = nil
				return s.signal(syscall.SIGCONT)
			}},
			{6 * time.Second, func(context.Context, *stage) error { return nil }},
		},
		verdict: func(s *stage) error {
			if gap := s.gap(); gap > failoverAlive {
				return fmt.Errorf("no answer for %v", gap)
			}
			s.story.at(good, "", "those lost came within that second; then the DNS pods answered through kube-proxy's rules")
			return s.judge(byGuard, byAny, byPods, byAny, byGuard)
		},
	}.run(ctx, env)
}

// upgradeStall is how long the old process stands still when it is told to end.
const upgradeStall = 100 * time.Millisecond

// runUpgrade starts a second process under load, and ends the first.
func runUpgrade(ctx context.Context, env *Env) error {
	return failover{
		title:  "dnsguard is upgraded: a second process starts, then the first is told to end.",
		length: 6 * time.Second,
		events: []happening{
			{2 * time.Second, func(ctx context.Context, s *stage) error {
				if err := s.start(ctx); err != nil {
					return err
				}
				s.story.at(event, "the old one", "is told to end (SIGTERM), and stands still for 0.1 s just then, as on a busy machine")
				return s.retire(ctx)
			}},
		},
		verdict: func(s *stage) error {
			if lost := s.lost(); lost > 0 {
				return fmt.Errorf("%d queries were lost", lost)
			}
			s.story.at(good, "", "none lost: the new one had taken all new queries, the old one answered what it had, and went")
			return s.judge(byGuard, byGuard)
		},
	}.run(ctx, env)
}

// run plays the scenario.
func (f failover) run(ctx context.Context, env *Env) error {
	s := &stage{story: &story{out: env.Out, colour: env.Colour}, exe: env.Exe, reached: make(map[*daemon]int)}
	err := f.play(ctx, s)
	if err != nil && ctx.Err() != nil {
		s.story.say("interrupted; the laboratory is gone")
	}
	return err
}

func (f failover) play(ctx context.Context, s *stage) (err error) {
	s.story.say("%s", s.story.paint(title, f.title))
	s.story.say("A laboratory of network namespaces on this machine: a node, two DNS pods (stand-ins for CoreDNS)")
	s.story.say("behind 10.96.0.10 with kube-proxy's rules, dnsguard, and a pod that asks 10.96.0.10 %d times a", failoverRate)
	s.story.say("second for a name that both know: half from %d ports that stay, half from a new port each.", failoverSockets)
	if err := s.build(ctx); err != nil {
		return errors.Join(err, s.remove())
	}
	defer func() { err = errors.Join(err, s.remove()) }()
	s.story.chapter("Timeline")
	if err := s.start(ctx); err != nil {
		return err
	}
	s.story.start = time.Now()
	if err := s.perform(ctx, f); err != nil {
		return err
	}
	sent, answered := s.fixed.Sent+s.fresh.Sent, s.fixed.Answered+s.fresh.Answered
	mood := good
	if s.lost() > 0 {
		mood = bad
	}
	s.story.at(mood, "the pod", "asked %d times, was answered %d times: %d lost; longest time without an answer %d ms",
		sent, answered, s.lost(), s.gap().Milliseconds())
	return f.verdict(s)
}

// build makes the laboratory.
func (s *stage) build(ctx context.Context) (err error) {
	if s.lab, err = New(); err != nil {
		return err
	}
	for _, pod := range []string{"dns-a", "dns-b"} {
		d, err := s.lab.AddDNS(ctx, pod, ClusterZone(), ExternalZone())
		if err != nil {
			return err
		}
		s.dns = append(s.dns, d)
	}
	if err := s.lab.DNS.SetEndpoints(Endpoints(s.dns...)...); err != nil {
		return err
	}
	s.client, err = s.lab.AddPod("client")
	return err
}

// remove ends what still lives, and the laboratory.
func (s *stage) remove() error {
	if s.lab == nil {
		return nil
	}
	var errs []error
	for _, d := range s.daemons {
		errs = append(errs, d.stop())
	}
	return errors.Join(append(errs, s.lab.Close())...)
}

// start starts a dnsguard.
func (s *stage) start(ctx context.Context) error {
	d, err := startDaemon(ctx, s.exe, s.lab, whole)
	if err != nil {
		return err
	}
	s.daemons = append(s.daemons, d)
	s.story.at(event, "dnsguard", "started (process %d), and takes the pod's queries", d.process.Pid())
	return nil
}

// last is the dnsguard that was started last.
func (s *stage) last() *daemon { return s.daemons[len(s.daemons)-1] }

func (s *stage) signal(sig syscall.Signal) error {
	if err := s.last().process.Signal(sig); err != nil {
		return fmt.Errorf("send %v to dnsguard: %w", sig, err)
	}
	return nil
}

func (s *stage) kill() error {
	if err := s.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-s.last().process.Done()
	return nil
}

// retire ends the first dnsguard, which stands still for a moment.
func (s *stage) retire(ctx context.Context) error {
	old := s.daemons[0]
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGTERM} {
		if err := old.process.Signal(sig); err != nil {
			return fmt.Errorf("send %v to dnsguard: %w", sig, err)
		}
	}
	select {
	case <-time.After(upgradeStall):
	case <-ctx.Done():
		return ctx.Err()
	}
	// It goes on, with the signal pending: a second one would end it at once.
	if err := old.process.Signal(syscall.SIGCONT); err != nil {
		return fmt.Errorf("let dnsguard go on: %w", err)
	}
	if err := old.awaitEnd(); err != nil {
		return err
	}
	s.story.at(event, "the old one", "has ended")
	return nil
}

// perform runs the load and, beside it, the events.
func (s *stage) perform(ctx context.Context, f failover) error {
	loading, stop := context.WithCancel(ctx)
	var loads sync.WaitGroup
	defer func() { stop(); loads.Wait() }()
	failed := make(chan error, 2)
	load := func(sockets int, into **LoadResult) {
		const rate = failoverRate / 2
		l := Load{
			Server: s.lab.DNS.Addr(true), Rate: rate, Queries: rate * int(f.length/time.Second),
			Sockets: sockets, Names: []string{failoverName}, Timeout: failoverTimeout,
		}
		loads.Go(func() {
			r, err := l.Run(loading, s.client.Namespace)
			*into = r
			failed <- err
		})
	}
	load(failoverSockets, &s.fixed)
	load(0, &s.fresh)

	tick, next := time.NewTicker(failoverTick), time.NewTimer(f.events[0].at)
	defer func() { tick.Stop(); next.Stop() }()
	s.look(ctx) // from here on
	var line, part reach
	look := func() {
		now := s.look(ctx)
		line.add(now)
		part.add(now)
	}
	for number, running := 0, 2; running > 0; {
		select {
		case <-tick.C:
			look()
			s.story.at(plain, "", "reached dnsguard: %5d   reached the DNS pods: %5d", line.guard, line.pods)
			line = reach{}
		case <-next.C:
			look()
			s.taken = append(s.taken, part)
			part = reach{}
			if err := f.events[number].do(ctx, s); err != nil {
				return err
			}
			if number++; number < len(f.events) {
				next.Reset(time.Until(s.story.start.Add(f.events[number].at)))
			}
		case err := <-failed:
			if err != nil {
				return err
			}
			running--
		}
	}
	look()
	s.taken = append(s.taken, part)
	return nil
}

// look returns what has reached whom since the last look. A daemon that is dead
// or hangs does not tell.
func (s *stage) look(ctx context.Context) (now reach) {
	for _, d := range s.daemons {
		if d.ended() || d == s.hung {
			continue
		}
		if n, err := d.queries(ctx); err == nil { // else the next look has it
			now.guard += n - s.reached[d]
			s.reached[d] = n
		}
	}
	served := 0
	for _, d := range s.dns {
		udp, _ := d.Server.Total()
		served += udp
	}
	now.pods, s.served = served-s.served, served
	return now
}

func (s *stage) lost() int { return s.fixed.Failed() + s.fresh.Failed() }

// gap is the longest time without an answer.
func (s *stage) gap() time.Duration {
	_, fixed := s.fixed.LongestOutage()
	_, fresh := s.fresh.LongestOutage()
	return max(fixed, fresh)
}

// by tells who had the queries between two events.
type by int

const (
	byGuard by = iota
	byPods
	byAny
)

// judge says whether the story was true: who had most of the queries before
// the first event, between events, and after the last.
func (s *stage) judge(want ...by) error {
	for i, w := range want {
		got := s.taken[i]
		if w == byGuard && got.guard <= got.pods || w == byPods && got.pods <= got.guard {
			return fmt.Errorf("in part %d of the timeline %d queries reached dnsguard and %d the DNS pods", i+1, got.guard, got.pods)
		}
	}
	return nil
}
