package kube

import (
	"context"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/resolver/search"
)

func TestAPIFollows(t *testing.T) {
	inBubble(t, onlyDNS, withDNS, func(t *testing.T, r *rig) {
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		if s := r.watcher.Stats(); !s.Synced {
			t.Errorf("not synced: %+v", s)
		}
		r.tellings()

		// News travel in no time.
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.2", "10.244.0.3"}, func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[1].Conditions.Terminating = new(true)
		}))
		synctest.Wait()
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53 terminating")
		if states, problems := r.tellings(); states != 1 || problems != nil {
			t.Errorf("told %d states, problems %q", states, problems)
		}

		// What says nothing new is no news.
		before := r.watcher.State()
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.2", "10.244.0.3"}, func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "now"}
			s.Endpoints[1].Conditions.Terminating = new(true)
		}))
		// Other Services' objects are not even heard of.
		r.put(dnsService(func(s *corev1.Service) { s.Name = "other" }),
			dnsSlice("other-a", []string{"10.244.9.9"}, func(s *discoveryv1.EndpointSlice) {
				s.Labels[discoveryv1.LabelServiceName] = "other"
			}))
		synctest.Wait()
		if states, problems := r.tellings(); states != 0 || problems != nil || r.watcher.State() != before {
			t.Errorf("told %d states of nothing new, problems %q", states, problems)
		}

		r.remove(dnsSlice("kube-dns-a", nil))
		synctest.Wait()
		r.wantEndpoints(t, "")
		r.remove(dnsService())
		synctest.Wait()
		r.wantEndpoints(t, "no service")
		if m := r.watcher.State().Missing; !slices.Equal(m, []Name{kubeDNS}) {
			t.Errorf("missing %v", m)
		}
		r.put(dnsService(), dnsSlice("kube-dns-b", []string{"10.244.0.7"}))
		synctest.Wait()
		r.wantEndpoints(t, "10.244.0.7:53")
		if m := r.watcher.State().Missing; m != nil {
			t.Errorf("missing %v", m)
		}
	})
}

// TestAPIAsksLittle is about what ten thousand nodes do to an API server.
func TestAPIAsksLittle(t *testing.T) {
	all := Config{
		Services: []Name{kubeDNS}, DNSService: kubeDNS,
		Pods: true, NodeName: thisNode, Namespaces: true,
	}
	tests := []struct {
		name        string
		noWatchList bool
		// per watch: at the start, and when a watch ends
		start, rewatch []string
	}{
		{"streamed lists", false, []string{"stream"}, []string{"watch"}},
		{"a server without streamed lists", true, []string{"stream", "list", "watch"}, []string{"watch"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			prepare := func(a *apiServer) {
				withDNS(a)
				a.noWatchList = tt.noWatchList
			}
			inBubble(t, all, prepare, func(t *testing.T, r *rig) {
				wantRequests(t, "at the start", r.take(), tt.start)
				if _, problems := r.tellings(); problems != nil {
					t.Errorf("problems %q", problems)
				}
				r.after(4*time.Minute + 59*time.Second)
				wantRequests(t, "within five minutes", r.take(), nil)
				// By now each watch has come to its end once.
				r.after(5 * time.Minute)
				wantRequests(t, "within ten minutes", r.take(), tt.rewatch)
				if states, problems := r.tellings(); states != 0 || problems != nil {
					t.Errorf("told %d states, problems %q", states, problems)
				}
			})
		})
	}
}

func wantRequests(t *testing.T, when string, rs []request, want []string) {
	t.Helper()
	got := map[string][]string{}
	for _, r := range rs {
		what := "list"
		switch {
		case r.query.Get("sendInitialEvents") == "true":
			what = "stream"
			if r.query.Get("resourceVersionMatch") != "NotOlderThan" {
				t.Errorf("streamed list not from the server's cache: %v", r.query)
			}
		case r.isWatch():
			what = "watch"
			if v := r.query.Get("resourceVersion"); v == "" || v == "0" {
				t.Errorf("watch from the beginning: %v", r.query)
			}
		default:
			if r.query.Get("resourceVersion") != "0" || r.query.Get("limit") != "500" {
				t.Errorf("list not from the server's cache, or unlimited: %v", r.query)
			}
		}
		if r.isWatch() && r.query.Get("allowWatchBookmarks") != "true" {
			t.Errorf("watch without bookmarks: %v", r.query)
		}
		if ua := r.header.Get("User-Agent"); ua != "dnsguard/test" {
			t.Errorf("User-Agent %q", ua)
		}
		id := r.path + "?" + r.query.Get("fieldSelector") + r.query.Get("labelSelector")
		got[id] = append(got[id], what)
	}
	all := []string{
		"/api/v1/namespaces/kube-system/services?metadata.name=kube-dns",
		"/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices?kubernetes.io/service-name=kube-dns",
		"/api/v1/pods?spec.nodeName=" + thisNode,
		"/api/v1/namespaces?",
	}
	for _, id := range all {
		if !slices.Equal(got[id], want) {
			t.Errorf("%s: %s: %v, want %v", when, id, got[id], want)
		}
		delete(got, id)
	}
	if len(got) > 0 {
		t.Errorf("%s: unexpected: %v", when, slices.Collect(maps.Keys(got)))
	}
}

const (
	dnsServiceWatch = "services kube-system/kube-dns"
	dnsSliceWatch   = "endpointslices of kube-system/kube-dns"
	refusedText     = "dial tcp 10.96.0.1:443: connect: connection refused"
)

func TestAPIAbsent(t *testing.T) {
	prepare := func(a *apiServer) {
		withDNS(a)
		a.down = true
	}
	inBubble(t, onlyDNS, prepare, func(t *testing.T, r *rig) {
		wantProblems(t, r, dnsServiceWatch+": "+refusedText, dnsSliceWatch+": "+refusedText)
		r.after(time.Hour)
		if states, problems := r.tellings(); states != 0 || problems != nil {
			t.Errorf("told %d states of an API server that is not there, problems %q", states, problems)
		}
		if s := r.watcher.State(); s.Guard != nil || s.DNS != nil || s.Missing != nil {
			t.Errorf("state %+v before anything is known", s)
		}
		if s := r.watcher.Stats(); s.Synced || s.Age != time.Hour {
			t.Errorf("synced %v, age %v; want false and an hour", s.Synced, s.Age)
		}
		r.behave(func() {
			// Two watches, each of which asks about every 18 s on average.
			if n := len(r.dials); n < 2*100 || n > 2*300 {
				t.Errorf("tried %d times in an hour", n)
			}
			slices.SortFunc(r.dials, time.Time.Compare)
			if n := len(slices.Compact(r.dials[2:])); n != len(r.dials)-2 {
				t.Errorf("%d of %d attempts without jitter", len(r.dials)-2-n, len(r.dials))
			}
			r.down = false
		})
		r.after(time.Minute) // the longest pause
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		wantProblems(t, r, dnsServiceWatch+": well", dnsSliceWatch+": well")
	})
}

// TestAPIGoes is about an API server that was there and goes.
func TestAPIGoes(t *testing.T) {
	inBubble(t, onlyDNS, withDNS, func(t *testing.T, r *rig) {
		r.after(10 * time.Minute)
		// While all is well, the age is that of the last bookmark.
		for range 30 {
			r.after(10 * time.Second)
			if age := r.watcher.Stats().Age; age > bookmarkInterval {
				t.Fatalf("age %v", age)
			}
		}
		r.tellings()
		r.take()
		r.behave(func() { r.down = true })
		r.cut()
		r.after(30 * time.Minute)
		wantProblems(t, r, dnsServiceWatch+": "+refusedText, dnsSliceWatch+": "+refusedText)
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		s := r.watcher.Stats()
		if !s.Synced || s.Age < 30*time.Minute || s.Age > 31*time.Minute {
			t.Errorf("synced %v, age %v; want true and about half an hour", s.Synced, s.Age)
		}

		// It goes on where it was cut off, although things have happened.
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.4"}))
		r.behave(func() { r.down = false })
		r.after(time.Minute)
		r.wantEndpoints(t, "10.244.0.4:53")
		for _, req := range r.take() {
			if !req.isWatch() || req.query.Get("sendInitialEvents") != "" {
				t.Errorf("listed anew: %s %v", req.path, req.query)
			}
		}
		wantProblems(t, r, dnsServiceWatch+": well", dnsSliceWatch+": well")
		if age := r.watcher.Stats().Age; age > time.Minute {
			t.Errorf("age %v", age)
		}
	})
}

func TestAPICut(t *testing.T) {
	inBubble(t, onlyDNS, withDNS, func(t *testing.T, r *rig) {
		r.after(5 * time.Second)
		r.tellings()
		r.cut()
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.5"}))
		r.after(2 * time.Second)
		r.wantEndpoints(t, "10.244.0.5:53")
		wantProblems(t, r)
	})
}

func TestAPIGone(t *testing.T) {
	inBubble(t, onlyDNS, withDNS, func(t *testing.T, r *rig) {
		r.after(5 * time.Second)
		r.tellings()
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.6"}))
		synctest.Wait()
		r.behave(func() { r.down = true })
		r.cut()
		r.after(time.Second)
		// Deletions that nobody will ever tell of.
		r.remove(dnsSlice("kube-dns-a", nil))
		r.put(dnsSlice("kube-dns-b", []string{"10.244.0.8"}))
		r.forget()
		r.behave(func() { r.down = false })
		r.after(time.Minute)
		r.wantEndpoints(t, "10.244.0.8:53")
	})
}

func TestAPIForbidden(t *testing.T) {
	c := onlyDNS
	c.Pods, c.NodeName = true, thisNode
	prepare := func(a *apiServer) {
		withDNS(a)
		a.refuse = forbidden("pods")
	}
	inBubble(t, c, prepare, func(t *testing.T, r *rig) {
		r.after(time.Minute)
		// One part's trouble is not another's.
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		wantProblems(t, r, "pods of node node1: pods is forbidden: not allowed")
		if s := r.watcher.Stats(); s.Synced {
			t.Error("synced without the pods")
		}
		if r.watcher.State().Excluded != nil {
			t.Error("excluded addresses known without the pods")
		}
		r.take()
		r.after(time.Hour)
		if n := len(r.take()); n > 4*60*2+20 {
			t.Errorf("asked %d times in an hour", n) // each attempt: stream, then list
		}
		r.behave(func() { r.refuse = nil })
		r.after(time.Minute)
		wantProblems(t, r, "pods of node node1: well")
		if s := r.watcher.State(); s.Excluded == nil {
			t.Error("excluded addresses still not known")
		}
	})
}

// TestAPISilent is about a server that takes requests and does not answer.
func TestAPISilent(t *testing.T) {
	inBubble(t, onlyDNS, func(a *apiServer) {
		withDNS(a)
		a.noWatchList = true
		a.hang = func(r *http.Request) <-chan struct{} { return make(chan struct{}) }
	}, func(t *testing.T, r *rig) {
		r.after(time.Hour)
		if s := r.watcher.Stats(); s.Synced || s.Age != time.Hour {
			t.Errorf("synced %v, age %v", s.Synced, s.Age)
		}
		n := len(r.take())
		if n < 10 || n > 2*60 {
			t.Errorf("asked %d times in an hour", n)
		}
		_, problems := r.tellings()
		if len(problems) != 2 || !strings.Contains(problems[0], "no answer within 1m10s") {
			t.Errorf("problems %q", problems)
		}
		r.behave(func() { r.hang = nil })
		r.after(20 * time.Minute)
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
	})
}

// TestAPISlow is about a server whose answers come late.
func TestAPISlow(t *testing.T) {
	inBubble(t, onlyDNS, func(a *apiServer) {
		withDNS(a)
		a.hang = func(r *http.Request) <-chan struct{} {
			late := make(chan struct{})
			time.AfterFunc(30*time.Second, func() { close(late) })
			return late
		}
	}, func(t *testing.T, r *rig) {
		r.wantEndpoints(t, "unknown")
		r.after(29 * time.Second)
		r.wantEndpoints(t, "unknown")
		r.after(time.Second)
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		wantProblems(t, r)
	})
}

func TestAPIPods(t *testing.T) {
	policy, err := search.New(search.Config{ClusterDomain: "cluster.local", NDots: 5})
	must(t, err)
	c := Config{Pods: true, NodeName: thisNode, Namespaces: true, ListOf: policy.ListOf}
	ip := netip.MustParseAddr("10.244.1.5")
	inBubble(t, c, func(a *apiServer) {
		a.put(
			namespaceObject("shop", nil),
			runningPod("shop", "web", "10.244.1.5"),
			runningPod("shop", "elsewhere", "10.244.2.5", func(p *corev1.Pod) { p.Spec.NodeName = "node2" }),
		)
	}, func(t *testing.T, r *rig) {
		s := r.watcher.State()
		if len(s.Clients) != 1 || s.Clients[ip] == nil || s.Clients[ip].Expand || len(s.Excluded) != 0 {
			t.Fatalf("clients %v, excluded %v", s.Clients, s.Excluded)
		}
		r.put(namespaceObject("shop", map[string]string{"dnsguard.io/expand": "true", "dnsguard.io/intercept": "false"}))
		synctest.Wait()
		s = r.watcher.State()
		if l := s.Clients[ip]; l == nil || !l.Expand || !slices.Equal(s.Excluded, []netip.Addr{ip}) {
			t.Errorf("clients %v, excluded %v", s.Clients, s.Excluded)
		}
		r.put(namespaceObject("shop", nil))
		other, err := search.New(search.Config{ClusterDomain: "example.org", NDots: 3})
		must(t, err)
		r.watcher.SetListOf(other.ListOf)
		synctest.Wait()
		if l := r.watcher.State().Clients[ip]; l == nil || l.NDots != 3 || l.Expand {
			t.Errorf("list %+v after the policy has changed", l)
		}
		r.remove(runningPod("shop", "web", ""))
		synctest.Wait()
		if _, known := r.watcher.State().Clients[ip]; known {
			t.Error("a deleted pod is still known")
		}
	})
}

// TestAPIEncodings reads every kind in both encodings.
func TestAPIEncodings(t *testing.T) {
	c := Config{Services: []Name{kubeDNS}, DNSService: kubeDNS, Pods: true, NodeName: thisNode, Namespaces: true}
	for _, encoding := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		t.Run(encoding, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := startAPI(t)
				withDNS(a)
				a.put(namespaceObject("shop", map[string]string{"dnsguard.io/intercept": "false"}), runningPod("shop", "web", "fd00::5"))
				cfg := a.config()
				cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return accepting{rt, encoding} })
				api, err := newAPI(cfg)
				must(t, err)
				c.Source = api
				w, err := New(c)
				must(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { w.Run(ctx) })
				synctest.Wait()
				s := w.State()
				if s.Guard == nil || len(s.Guard.Services) != 1 || s.DNS == nil || !slices.Equal(s.Excluded, addrs("fd00::5")) {
					t.Errorf("state %+v", s)
				}
				cancel()
				running.Wait()
			})
		})
	}
}

type accepting struct {
	http.RoundTripper
	encoding string
}

func (a accepting) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Accept", a.encoding)
	return a.RoundTripper.RoundTrip(r)
}

// TestCoalescing is about a receiver that is slower than the news.
func TestCoalescing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := startAPI(t)
		withDNS(a)
		api, err := newAPI(a.config())
		must(t, err)
		var told []*ctguard.Snapshot
		c := onlyDNS
		c.Source = api
		c.OnChange = func(s *State) {
			if s.Guard == nil {
				return
			}
			told = append(told, s.Guard)
			time.Sleep(time.Second)
		}
		w, err := New(c)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { w.Run(ctx) })
		time.Sleep(100 * time.Millisecond)
		for i := range 50 {
			a.put(dnsSlice("kube-dns-a", []string{netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}).String()}))
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(2 * time.Second)
		cancel()
		running.Wait()
		if len(told) != 2 {
			t.Fatalf("told %d times, want the first and the latest", len(told))
		}
		if got := told[1].Services[0].Ports[0].Endpoints[0].Addr.String(); got != "10.244.1.49:53" {
			t.Errorf("the latest is %s", got)
		}
	})
}
