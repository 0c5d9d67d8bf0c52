package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dnsguard/dnsguard/resolver/search"
)

// onFile plays a scenario with a watcher over a file, in virtual time.
func onFile(t *testing.T, content string, play func(t *testing.T, path string, w *Watcher, news func() string)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "cluster.yaml")
		if content != "" {
			must(t, os.WriteFile(path, []byte(content), 0o644))
		}
		var mu sync.Mutex
		var told []string
		tell := func(s string) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, strings.ReplaceAll(s, path, "FILE"))
		}
		w, err := New(Config{
			Source: NewFile(path), Services: []Name{kubeDNS}, DNSService: kubeDNS,
			OnChange: func(s *State) {
				if len(s.Guard.Services) == 0 {
					tell("nothing")
					return
				}
				tell(fmt.Sprint(len(s.Guard.Services[0].Ports[0].Endpoints), " endpoints"))
			},
			OnProblem: func(p Problem) { tell(fmt.Sprint(p.Watch, ": ", p.Err)) },
		})
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { w.Run(ctx) })
		time.Sleep(fileInterval / 2) // looks happen between what the scenario does
		synctest.Wait()
		play(t, path, w, func() string {
			mu.Lock()
			defer mu.Unlock()
			defer func() { told = nil }()
			return strings.Join(told, "; ")
		})
		cancel()
		running.Wait()
	})
}

func looks(n int) {
	time.Sleep(time.Duration(n) * fileInterval)
	synctest.Wait()
}

func want(t *testing.T, got, want string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
}

func TestFile(t *testing.T) {
	whole := example(t)
	oneLess := strings.Replace(whole, "- addresses: [10.244.0.3]\n  conditions: {ready: false, serving: true, terminating: true}\n", "", 1)
	onFile(t, whole, func(t *testing.T, path string, w *Watcher, news func() string) {
		want(t, news(), "3 endpoints")

		// A change counts when two looks agree on it.
		must(t, os.WriteFile(path, []byte(oneLess), 0o644))
		looks(1)
		want(t, news(), "")
		looks(1)
		want(t, news(), "2 endpoints")

		// A file that is being written is never taken for the whole.
		for n := range 20 {
			must(t, os.WriteFile(path, []byte(whole[:n*len(whole)/20]), 0o644))
			looks(1)
		}
		must(t, os.WriteFile(path, []byte(whole), 0o644))
		looks(2)
		want(t, news(), "3 endpoints")

		// Another way to write the same is no news.
		must(t, os.WriteFile(path, []byte("# new\n"+whole), 0o644))
		looks(4)
		want(t, news(), "")
		if age := w.Stats().Age; age > fileInterval {
			t.Errorf("age %v", age)
		}

		// What is wrong is told once, and changes nothing.
		before := w.State()
		bad := strings.Replace(whole, "port: 53,", "port: 0,", 1)
		must(t, os.WriteFile(path, []byte(bad), 0o644))
		looks(41)
		want(t, news(), "file FILE: FILE is refused, what it said before stays in force: "+
			"document 1, line 19: Service kube-system/kube-dns: spec.ports[0].port: 0 is not a port, want 1 to 65535")
		if w.State() != before {
			t.Error("the state is another one")
		}
		if s := w.Stats(); !s.Synced || s.Age != 41*fileInterval+fileInterval/2 || s.Watches[0].Err == nil {
			t.Errorf("stats %+v", s)
		}
		must(t, os.Remove(path))
		looks(2)
		want(t, news(), "file FILE: open FILE: no such file or directory")
		must(t, os.WriteFile(path, []byte(oneLess), 0o644))
		looks(2)
		want(t, news(), "2 endpoints; file FILE: <nil>")

		// The Service itself goes.
		must(t, os.WriteFile(path, []byte(whole[strings.Index(whole, "---"):]), 0o644))
		looks(2)
		want(t, news(), "nothing")
		if m := w.State().Missing; len(m) != 1 || m[0] != kubeDNS {
			t.Errorf("missing %v", m)
		}
	})
}

// TestFileWithoutService: a configured Service that does not exist is missed by
// name, and taken up when it appears.
func TestFileWithoutService(t *testing.T) {
	whole := example(t)
	onFile(t, whole[strings.Index(whole, "---"):], func(t *testing.T, path string, w *Watcher, news func() string) {
		want(t, news(), "nothing")
		s := w.State()
		if len(s.Missing) != 1 || s.Missing[0] != kubeDNS || s.DNS == nil || len(s.DNS.ClusterIPs) != 0 {
			t.Errorf("missing %v, DNS %+v", s.Missing, s.DNS)
		}
		if w.Stats().Watches[0].Err != nil {
			t.Errorf("a Service that does not exist is taken for a fault: %v", w.Stats().Watches[0].Err)
		}
		looks(100)
		want(t, news(), "") // told once
		must(t, os.WriteFile(path, []byte(whole), 0o644))
		looks(2)
		want(t, news(), "3 endpoints")
		if s := w.State(); s.Missing != nil || len(s.DNS.ClusterIPs) == 0 {
			t.Errorf("missing %v, DNS %+v", s.Missing, s.DNS)
		}
	})
}

// TestFileMalformed: a file that is no YAML any more, or has objects that cannot
// be, keeps the state that there was, and tells the line.
func TestFileMalformed(t *testing.T) {
	whole := example(t)
	for _, tt := range []struct{ name, old, new, want string }{
		{"a tab", "kind: EndpointSlice", "\tkind: EndpointSlice", "not YAML"},
		{"cut in the middle of a mapping", "addressType: IPv4\n", "addressType: {IPv4\n", "not YAML"},
		{"an endpoint of the wrong family", "- addresses: [10.244.0.3]", "- addresses: [fd00::3]", "is not of type IPv4"},
		{"a misspelt key", "endpoints:", "endpionts:", "endpionts: unknown field"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(whole, tt.old) {
				t.Fatalf("the example has no %q", tt.old)
			}
			onFile(t, whole, func(t *testing.T, path string, w *Watcher, news func() string) {
				want(t, news(), "3 endpoints")
				before := w.State()
				must(t, os.WriteFile(path, []byte(strings.Replace(whole, tt.old, tt.new, 1)), 0o644))
				looks(10)
				told := news()
				line := regexp.MustCompile(`^file FILE: FILE is refused, what it said before stays in force: document \d+, (at or below )?line \d+: `)
				if !line.MatchString(told) || !strings.Contains(told, tt.want) || w.State() != before {
					t.Errorf("told %q", told)
				}
				must(t, os.WriteFile(path, []byte(whole), 0o644))
				looks(2)
				want(t, news(), "file FILE: <nil>")
			})
		})
	}
}

func TestFileAbsent(t *testing.T) {
	onFile(t, "", func(t *testing.T, path string, w *Watcher, news func() string) {
		want(t, news(), "file FILE: open FILE: no such file or directory")
		looks(100)
		want(t, news(), "")
		if s := w.Stats(); s.Synced || w.State().Guard != nil {
			t.Errorf("stats %+v, state %+v", s, w.State())
		}
		must(t, os.WriteFile(path, []byte(example(t)), 0o644))
		looks(2)
		want(t, news(), "3 endpoints; file FILE: <nil>")
	})
}

// TestFileMounted changes the file as the kubelet does a ConfigMap's.
func TestFileMounted(t *testing.T) {
	onFile(t, "", func(t *testing.T, path string, _ *Watcher, news func() string) {
		dir := filepath.Dir(path)
		mount := func(version, content string) {
			must(t, os.Mkdir(filepath.Join(dir, version), 0o755))
			must(t, os.WriteFile(filepath.Join(dir, version, "cluster.yaml"), []byte(content), 0o644))
			must(t, os.Symlink(version, filepath.Join(dir, "tmp")))
			must(t, os.Rename(filepath.Join(dir, "tmp"), filepath.Join(dir, "..data")))
		}
		must(t, os.Symlink("..data/cluster.yaml", path))
		news()
		mount("..1", example(t))
		looks(2)
		want(t, news(), "3 endpoints; file FILE: <nil>")
		mount("..2", strings.Replace(example(t), "- addresses: [10.244.0.2]\n", "- addresses: [10.244.0.3]\n", 1))
		looks(2)
		want(t, news(), "2 endpoints")
	})
}

func TestFileTooLarge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cluster.yaml")
	must(t, os.WriteFile(path, nil, 0o644))
	must(t, os.Truncate(path, maxFile))
	if _, err := NewFile(path).read(); err != nil {
		t.Error(err)
	}
	must(t, os.Truncate(path, maxFile+1))
	if _, err := NewFile(path).read(); err == nil {
		t.Error("read a file that is too large")
	}
}

// TestSourcesAgree has both sources tell of the same objects.
func TestSourcesAgree(t *testing.T) {
	policy, err := search.New(search.Config{ClusterDomain: "cluster.local", NDots: 5})
	must(t, err)
	c := Config{
		Services: []Name{kubeDNS, {"kube-system", "absent"}}, DNSService: kubeDNS,
		Pods: true, NodeName: thisNode, Namespaces: true, ListOf: policy.ListOf,
	}
	content := example(t)
	m, err := parseManifest([]byte(content))
	must(t, err)

	var fromAPI, fromFile *State
	inBubble(t, c, func(a *apiServer) {
		for _, o := range m.services {
			a.put(o)
		}
		for _, o := range m.slices {
			a.put(o)
		}
		for _, o := range m.pods {
			a.put(o)
		}
		for _, o := range m.namespaces {
			a.put(o)
		}
		a.put([]runtime.Object{dnsService(func(s *corev1.Service) { s.Namespace = "other" })}...)
	}, func(_ *testing.T, r *rig) { fromAPI = r.watcher.State() })

	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "cluster.yaml")
		must(t, os.WriteFile(path, []byte(content), 0o644))
		c.Source = NewFile(path)
		w, err := New(c)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { w.Run(ctx) })
		synctest.Wait()
		fromFile = w.State()
		cancel()
		running.Wait()
	})
	if _, same := fromFile.since(fromAPI); !same {
		t.Errorf("API: %+v\nfile: %+v", fromAPI, fromFile)
	}
	if fromAPI.Guard == nil || len(fromAPI.Clients) != 2 || len(fromAPI.Excluded) != 2 || len(fromAPI.Missing) != 1 {
		t.Errorf("state %+v", fromAPI)
	}
}
