package kube

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dnsguard/dnsguard/resolver/search"
)

func TestClients(t *testing.T) {
	type podOf = *corev1.Pod
	noon := time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)
	started := func(after time.Duration) func(podOf) {
		return func(p podOf) { p.Status.StartTime = &metav1.Time{Time: noon.Add(after)} }
	}
	created := func(after time.Duration) func(podOf) {
		return func(p podOf) { p.CreationTimestamp = metav1.Time{Time: noon.Add(after)} }
	}
	phase := func(ph corev1.PodPhase) func(podOf) { return func(p podOf) { p.Status.Phase = ph } }
	deleting := func(p podOf) { p.DeletionTimestamp = &metav1.Time{Time: noon} }
	host := func(p podOf) { p.Spec.HostNetwork = true }
	annotated := func(v string) func(podOf) {
		return func(p podOf) { p.Annotations = map[string]string{"dnsguard.io/intercept": v} }
	}
	config := func(searches []string, options ...corev1.PodDNSConfigOption) func(podOf) {
		return func(p podOf) { p.Spec.DNSConfig = &corev1.PodDNSConfig{Searches: searches, Options: options} }
	}
	const ip = "10.244.1.5"
	tests := []struct {
		name       string
		pods       []podOf
		namespaces []*corev1.Namespace
		want       string // clients, by address: the namespace of the list's pod, and what is special
		excluded   string
	}{
		{name: "none"},
		{name: "one", pods: []podOf{runningPod("a", "p", ip)}, want: "10.244.1.5=a"},
		{
			name: "dual stack", pods: []podOf{runningPod("a", "p", ip, func(p podOf) {
				p.Status.PodIPs = []corev1.PodIP{{IP: ip}, {IP: "fd00::5"}}
			})},
			want: "10.244.1.5=a fd00::5=a",
		},
		{
			name: "podIP alone", pods: []podOf{runningPod("a", "p", ip, func(p podOf) { p.Status.PodIPs = nil })},
			want: "10.244.1.5=a",
		},
		{
			name: "not yet an address", pods: []podOf{runningPod("a", "p", "", phase(corev1.PodPending))},
		},
		{
			name: "finished",
			pods: []podOf{runningPod("a", "p", ip, phase(corev1.PodSucceeded)), runningPod("a", "q", "10.244.1.6", phase(corev1.PodFailed))},
		},
		{
			name: "init containers run", pods: []podOf{runningPod("a", "p", ip, phase(corev1.PodPending))},
			want: "10.244.1.5=none",
		},
		{
			name: "host network", pods: []podOf{runningPod("a", "p", "192.0.2.1", host), runningPod("b", "q", ip)},
			want: "10.244.1.5=b 192.0.2.1=none",
		},
		{
			name: "an address of the host's is never a pod's",
			pods: []podOf{runningPod("a", "p", ip, host, started(0)), runningPod("b", "q", ip, started(time.Hour))},
			want: "10.244.1.5=none",
		},
		{
			name: "address given away while the pod before seems to run",
			pods: []podOf{runningPod("old", "p", ip, started(0)), runningPod("new", "p", ip, started(time.Second))},
			want: "10.244.1.5=new",
		},
		{
			name: "address of a finished pod",
			pods: []podOf{runningPod("old", "p", ip, started(time.Hour), phase(corev1.PodSucceeded)), runningPod("new", "p", ip, started(0))},
			want: "10.244.1.5=new",
		},
		{
			name: "address of a pod whose successor's init containers run",
			pods: []podOf{runningPod("old", "p", ip, started(0)), runningPod("new", "p", ip, started(time.Second), phase(corev1.PodPending))},
			want: "10.244.1.5=none",
		},
		{
			name: "created long ago, waited for a node until now",
			pods: []podOf{
				runningPod("old", "p", ip, created(time.Hour), started(time.Hour)),
				runningPod("new", "p", ip, created(0), started(2*time.Hour)),
			},
			want: "10.244.1.5=new",
		},
		{
			name: "only one of its two addresses given away",
			pods: []podOf{
				runningPod("old", "p", ip, started(0), func(p podOf) {
					p.Status.PodIPs = []corev1.PodIP{{IP: ip}, {IP: "fd00::5"}}
				}),
				runningPod("new", "p", ip, started(time.Second)),
			},
			want: "10.244.1.5=new fd00::5=old",
		},
		{
			name: "started in the same second, one is being deleted",
			pods: []podOf{runningPod("old", "p", ip, started(0), deleting), runningPod("new", "p", ip, started(0))},
			want: "10.244.1.5=new",
		},
		{
			name: "started in the same second, created at different times",
			pods: []podOf{
				runningPod("old", "p", ip, created(0), started(2*time.Second)),
				runningPod("new", "p", ip, created(time.Second), started(2*time.Second)),
			},
			want: "10.244.1.5=new",
		},
		{
			name: "no telling which", pods: []podOf{runningPod("a", "p", ip, started(0)), runningPod("b", "p", ip, started(0), annotated("false"))},
			want: "10.244.1.5=none", excluded: "10.244.1.5",
		},
		{
			name: "no telling which, but a third is newer",
			pods: []podOf{runningPod("a", "p", ip), runningPod("b", "p", ip), runningPod("c", "p", ip, started(0))},
			want: "10.244.1.5=c",
		},
		{
			name: "only this pod's own DNS",
			pods: []podOf{runningPod("a", "p", ip, config([]string{"example.net"}, corev1.PodDNSConfigOption{Name: "ndots", Value: new("2")}))},
			want: "10.244.1.5=a,example.net,ndots2",
		},
		{
			name: "the last ndots counts",
			pods: []podOf{runningPod("a", "p", ip, config(nil,
				corev1.PodDNSConfigOption{Name: "ndots", Value: new("2")},
				corev1.PodDNSConfigOption{Name: "edns0"},
				corev1.PodDNSConfigOption{Name: "ndots", Value: new("3")}))},
			want: "10.244.1.5=a,ndots3",
		},
		{
			name: "ndots without a value is the libc's own",
			pods: []podOf{runningPod("a", "p", ip, config(nil, corev1.PodDNSConfigOption{Name: "ndots"}))},
			want: "10.244.1.5=a,ndots1",
		},
		{ // 15 to glibc, none to musl
			name: "a negative ndots", pods: []podOf{runningPod("a", "p", ip, config(nil, corev1.PodDNSConfigOption{Name: "ndots", Value: new("-1")}))},
			want: "10.244.1.5=none",
		},
		{
			name: "ndots that is no number", pods: []podOf{runningPod("a", "p", ip, config(nil, corev1.PodDNSConfigOption{Name: "ndots", Value: new("many")}))},
			want: "10.244.1.5=none",
		},
		{
			name: "ndots in the option's name", pods: []podOf{runningPod("a", "p", ip, config(nil, corev1.PodDNSConfigOption{Name: "ndots:2"}))},
			want: "10.244.1.5=none",
		},
		{
			name: "annotations of the namespace",
			pods: []podOf{runningPod("a", "p", ip), runningPod("b", "p", "10.244.1.6")},
			namespaces: []*corev1.Namespace{
				namespaceObject("a", map[string]string{"dnsguard.io/intercept": "false", "dnsguard.io/expand": "true"}),
				namespaceObject("b", map[string]string{"dnsguard.io/intercept": "no", "dnsguard.io/expand": "yes"}),
			},
			want: "10.244.1.5=a,expand 10.244.1.6=b", excluded: "10.244.1.5",
		},
		{
			name:       "the pod's annotation has the last word",
			pods:       []podOf{runningPod("a", "p", ip, annotated("true")), runningPod("b", "p", "10.244.1.6", annotated("false"))},
			namespaces: []*corev1.Namespace{namespaceObject("a", map[string]string{"dnsguard.io/intercept": "false"})},
			want:       "10.244.1.5=a 10.244.1.6=b", excluded: "10.244.1.6",
		},
		{
			name: "excluded as soon as it has an address",
			pods: []podOf{runningPod("a", "p", ip, phase(corev1.PodPending), annotated("false"))},
			want: "10.244.1.5=none", excluded: "10.244.1.5",
		},
		{
			name: "the exclusion does not pass on with the address",
			pods: []podOf{runningPod("old", "p", ip, started(0), annotated("false")), runningPod("new", "p", ip, started(time.Second))},
			want: "10.244.1.5=new",
		},
		{
			name: "nobody excludes the whole host",
			pods: []podOf{runningPod("a", "p", "192.0.2.1", host, annotated("false"))},
			want: "192.0.2.1=none",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pods := map[Name]pod{}
			for i, p := range tt.pods {
				pods[Name{p.Namespace, fmt.Sprint(p.Name, i)}] = newPod(p)
			}
			namespaces := map[Name]namespace{}
			for _, n := range tt.namespaces {
				namespaces[Name{Name: n.Name}] = newNamespace(n)
			}
			// The order in which a map is walked must not matter.
			for range 20 {
				specials := map[*search.List]string{}
				lists, excluded := clients(pods, namespaces, func(p search.Pod) *search.List {
					l := new(search.List)
					specials[l] = describePod(p)
					return l
				})
				got := []string{}
				for _, a := range slices.SortedFunc(maps.Keys(lists), netip.Addr.Compare) {
					what := "none"
					if l := lists[a]; l != nil {
						what = specials[l]
					}
					got = append(got, a.String()+"="+what)
				}
				if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
					t.Fatalf("clients (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(addrs(strings.Fields(tt.excluded)...), excluded, equateComparable); diff != "" && len(excluded)+len(tt.excluded) > 0 {
					t.Fatalf("excluded (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func describePod(p search.Pod) string {
	words := append([]string{p.Namespace}, p.Searches...)
	if p.NDots != nil {
		words = append(words, fmt.Sprint("ndots", *p.NDots))
	}
	if p.Expand {
		words = append(words, "expand")
	}
	return strings.Join(words, ",")
}

func TestClientsWithoutLists(t *testing.T) {
	p := newPod(runningPod("a", "p", "10.244.1.5", func(p *corev1.Pod) {
		p.Annotations = map[string]string{"dnsguard.io/intercept": "false"}
	}))
	lists, excluded := clients(map[Name]pod{{"a", "p"}: p}, nil, nil)
	if lists != nil || !slices.Equal(excluded, addrs("10.244.1.5")) {
		t.Errorf("lists %v, excluded %v", lists, excluded)
	}
}
