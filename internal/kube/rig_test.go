package kube

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// rig is a watcher over an API server, in virtual time.
type rig struct {
	*apiServer
	watcher *Watcher

	told     sync.Mutex
	states   []*State
	problems []Problem
}

// inBubble plays a scenario. That nothing is left running is part of each: a
// bubble ends only with its last goroutine.
func inBubble(t *testing.T, c Config, prepare func(*apiServer), play func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{apiServer: startAPI(t)}
		if prepare != nil {
			prepare(r.apiServer)
		}
		api, err := newAPI(r.config())
		must(t, err)
		c.Source = api
		c.OnChange = func(s *State) {
			r.told.Lock()
			defer r.told.Unlock()
			r.states = append(r.states, s)
		}
		c.OnProblem = func(p Problem) {
			r.told.Lock()
			defer r.told.Unlock()
			r.problems = append(r.problems, p)
		}
		r.watcher, err = New(c)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.watcher.Run(ctx) })
		synctest.Wait()
		play(t, r)

		began := time.Now()
		cancel()
		running.Wait()
		if took := time.Since(began); took != 0 {
			t.Errorf("Run took %v to return", took)
		}
	})
}

// after lets time go by.
func (r *rig) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// endpoints are those that the state has for the first port of the first
// Service, in short.
func (r *rig) endpoints() string {
	g := r.watcher.State().Guard
	switch {
	case g == nil:
		return "unknown"
	case len(g.Services) == 0:
		return "no service"
	}
	var es []string
	for _, e := range g.Services[0].Ports[0].Endpoints {
		text := e.Addr.String()
		if !e.Serving {
			text += " down"
		}
		if e.Terminating {
			text += " terminating"
		}
		es = append(es, text)
	}
	return strings.Join(es, ", ")
}

func (r *rig) wantEndpoints(t *testing.T, want string) {
	t.Helper()
	if got := r.endpoints(); got != want {
		t.Errorf("endpoints %q, want %q", got, want)
	}
}

// tellings returns how many states and which problems were told since it was
// last called.
func (r *rig) tellings() (states int, problems []string) {
	r.told.Lock()
	defer r.told.Unlock()
	states = len(r.states)
	for _, p := range r.problems {
		text := p.Watch + ": well"
		if p.Err != nil {
			text = p.Watch + ": " + p.Err.Error()
		}
		problems = append(problems, text)
	}
	r.states, r.problems = nil, nil
	slices.Sort(problems)
	return states, problems
}

var onlyDNS = Config{Services: []Name{kubeDNS}, DNSService: kubeDNS}

func withDNS(a *apiServer) {
	a.put(dnsService(), dnsSlice("kube-dns-a", []string{"10.244.0.2", "10.244.0.3"}))
}

func wantProblems(t *testing.T, r *rig, want ...string) {
	t.Helper()
	slices.Sort(want)
	if _, got := r.tellings(); !slices.Equal(got, want) {
		t.Errorf("problems %q, want %q", got, want)
	}
}
