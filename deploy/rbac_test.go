package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
)

// access is a request as RBAC sees it.
type access struct {
	verb, group, resource string
	namespace             string // "": all
	name                  string // of a list or watch: by field selector
}

func (a access) String() string {
	s := fmt.Sprintf("%s %s.%s", a.verb, a.resource, a.group)
	if a.name != "" {
		s += " " + a.name
	}
	if a.namespace != "" {
		s += " in " + a.namespace
	}
	return s
}

// accessOf reads a request as the API server's RequestInfo does.
func accessOf(r *http.Request) (access, error) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	var a access
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		a.group, parts = parts[1], parts[3:]
	default:
		return a, fmt.Errorf("unexpected request for %s", r.URL)
	}
	if len(parts) == 3 && parts[0] == "namespaces" {
		a.namespace, parts = parts[1], parts[2:]
	}
	if len(parts) != 1 || r.Method != http.MethodGet {
		return a, fmt.Errorf("neither a list nor a watch: %s %s", r.Method, r.URL)
	}
	a.resource, a.verb = parts[0], "list"
	if r.URL.Query().Get("watch") != "" {
		a.verb = "watch"
	}
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		return a, err
	}
	a.name, _ = selector.RequiresExactMatch("metadata.name")
	return a, nil
}

// grant is one thing that a rule allows.
type grant struct {
	access

	role string
}

// grants returns everything that the rules of a rendering allow.
func grants(all objects) []grant {
	var out []grant
	add := func(role, namespace string, rules []rbacv1.PolicyRule) {
		for _, r := range rules {
			for _, group := range r.APIGroups {
				for _, resource := range r.Resources {
					for _, verb := range r.Verbs {
						names := r.ResourceNames
						if len(names) == 0 {
							names = []string{""}
						}
						for _, name := range names {
							out = append(out, grant{access{verb, group, resource, namespace, name}, role})
						}
					}
				}
			}
		}
	}
	for _, r := range of[*rbacv1.Role](all) {
		add("Role "+r.Namespace+"/"+r.Name, r.Namespace, r.Rules)
	}
	for _, r := range of[*rbacv1.ClusterRole](all) {
		add("ClusterRole "+r.Name, "", r.Rules)
	}
	return out
}

// allows reports whether the grant covers a request: the whole cluster covers a
// namespace, all names cover one.
func (g grant) allows(a access) bool {
	return g.verb == a.verb && g.group == a.group && g.resource == a.resource &&
		(g.namespace == "" || g.namespace == a.namespace) && (g.name == "" || g.name == a.name)
}

// apiServer answers lists and watches of an empty cluster to whom the rules allow
// them.
type apiServer struct {
	streams bool // lists by watch, as current servers do

	mu      sync.Mutex
	grants  []grant
	used    map[grant]bool
	refused []string
	strange []error
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a, err := accessOf(r)
	s.mu.Lock()
	allowed := false
	for _, g := range s.grants {
		if err == nil && g.allows(a) {
			s.used[g], allowed = true, true
		}
	}
	switch {
	case err != nil:
		s.strange = append(s.strange, err)
	case !allowed:
		s.refused = append(s.refused, a.String())
	}
	s.mu.Unlock()
	initial := r.URL.Query().Get("sendInitialEvents") != ""
	switch {
	case err != nil || !allowed:
		// The API server's own words.
		message := fmt.Sprintf("%s is forbidden: User %q cannot %s resource %q in API group %q", a.resource,
			"system:serviceaccount:kube-system:dnsguard", a.verb, a.resource, a.group)
		if a.namespace != "" {
			message += fmt.Sprintf(" in the namespace %q", a.namespace)
		} else {
			message += " at the cluster scope"
		}
		status(w, http.StatusForbidden, metav1.StatusReasonForbidden, message)
	case initial && !s.streams:
		status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
	case a.verb == "list":
		answer(w, http.StatusOK, map[string]any{
			"kind": kindOf(a.resource) + "List", "apiVersion": versionOf(a.group),
			"metadata": map[string]any{"resourceVersion": "1"}, "items": []any{},
		})
	default:
		answer(w, http.StatusOK, nil)
		if initial {
			event := map[string]any{"type": "BOOKMARK", "object": map[string]any{
				"kind": kindOf(a.resource), "apiVersion": versionOf(a.group),
				"metadata": map[string]any{
					"resourceVersion": "1", "annotations": map[string]any{metav1.InitialEventsAnnotationKey: "true"},
				},
			}}
			_ = json.NewEncoder(w).Encode(event) // the client went
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason, message string) {
	answer(w, code, metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: message, //nolint:gosec // of HTTP
	})
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if body != nil {
		_ = json.NewEncoder(w).Encode(body) // the client went
	}
}

func kindOf(resource string) string {
	return map[string]string{"services": "Service", "endpointslices": "EndpointSlice", "pods": "Pod", "namespaces": "Namespace"}[resource]
}

func versionOf(group string) string {
	if group == "" {
		return "v1"
	}
	return group + "/v1"
}

// watch follows a stand-in API server as the daemon would, until the condition
// holds, and returns the problems it was told.
func watch(t *testing.T, cfg *config.Config, s *apiServer, until func(kube.Stats, []kube.Problem) bool) []kube.Problem {
	t.Helper()
	s.used = map[grant]bool{}
	server := httptest.NewServer(s)
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n", server.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	api, err := kube.NewAPI(kube.APIConfig{Kubeconfig: kubeconfig, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var problems []kube.Problem
	// As cmd/dnsguard does.
	c := kube.Config{
		Source: api, DNSService: kube.Name(cfg.Kubernetes.DNSService),
		Pods: true, NodeName: "node-1", Namespaces: true,
		OnProblem: func(p kube.Problem) {
			mu.Lock()
			defer mu.Unlock()
			problems = append(problems, p)
		},
	}
	if cfg.Guard.Enabled {
		for _, name := range cfg.Guard.Services {
			c.Services = append(c.Services, kube.Name(name))
		}
	}
	w, err := kube.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	defer running.Wait()
	defer stop()
	seen := func() []kube.Problem {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(problems)
	}
	for deadline := time.Now().Add(time.Minute); !until(w.Stats(), seen()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("after a minute: %+v, %v", w.Stats(), seen())
			break
		}
	}
	return seen()
}

// checkRequests: the rules allow what dnsguard asks for with this configuration, of
// a current API server and of one that does not stream lists, and nothing else.
func checkRequests(t *testing.T, cfg *config.Config, all objects) {
	t.Helper()
	if cfg.Kubernetes.Source != config.SourceAPI {
		return
	}
	used := map[grant]bool{}
	for _, streams := range []bool{true, false} {
		s := &apiServer{streams: streams, grants: grants(all)}
		// Both verbs: after the list comes the watch.
		watch(t, cfg, s, func(stats kube.Stats, problems []kube.Problem) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			watched := 0
			for g := range s.used {
				if g.verb == "watch" {
					watched++
				}
			}
			return len(problems)+len(s.refused)+len(s.strange) > 0 || stats.Synced && (streams || watched == len(s.used)-watched)
		})
		s.mu.Lock()
		for _, a := range s.refused {
			t.Errorf("not allowed: %s", a)
		}
		for _, err := range s.strange {
			t.Error(err)
		}
		for g := range s.used {
			used[g] = true
		}
		s.mu.Unlock()
	}
	for _, g := range grants(all) {
		if !used[g] {
			t.Errorf("%s allows %s, which nothing asks for", g.role, g)
		}
	}
}

// TestMissingPermission: the verb, the resource and where are named.
func TestMissingPermission(t *testing.T) {
	all := decodeFile(t, "daemonset.yaml")
	cfg := configOf(t, all)
	have := grants(all)
	for _, resource := range []string{"services", "endpointslices", "pods", "namespaces"} {
		for _, verb := range []string{"list", "watch"} {
			t.Run(verb+" "+resource, func(t *testing.T) {
				// Who streams lists never asks for one.
				s := &apiServer{streams: verb == "watch", grants: slices.DeleteFunc(slices.Clone(have), func(g grant) bool {
					return g.resource == resource && g.verb == verb
				})}
				problems := watch(t, cfg, s, func(_ kube.Stats, p []kube.Problem) bool { return len(p) > 0 })
				if len(problems) == 0 || problems[0].Err == nil {
					t.Fatalf("%v", problems)
				}
				text := problems[0].Watch + ": " + problems[0].Err.Error()
				if want := fmt.Sprintf("cannot %s resource %q", verb, resource); !strings.HasPrefix(text, resource) || !strings.Contains(text, want) {
					t.Errorf("no %q in %q", want, text)
				}
			})
		}
	}
}
