package kube

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestNewRefuses(t *testing.T) {
	source := NewFile("cluster.yaml")
	tests := []struct {
		name   string
		config Config
		want   string
	}{
		{"no source", Config{}, "no source"},
		{"pods of no node", Config{Source: source, Pods: true}, "node's name is not known"},
		{"a Service without a namespace", Config{Source: source, Services: []Name{{Name: "kube-dns"}}}, `watch service "kube-dns": namespace or name is missing`},
		{"a DNS Service without a name", Config{Source: source, DNSService: Name{Namespace: "a"}}, "namespace or name is missing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.config); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestServicesTwice(t *testing.T) {
	other := Name{"default", "dns"}
	w, err := New(Config{Source: NewFile("cluster.yaml"), Services: []Name{kubeDNS, other, kubeDNS}, DNSService: kubeDNS})
	must(t, err)
	if got := w.cfg.Services; !slices.Equal(got, []Name{other, kubeDNS}) {
		t.Errorf("services %v", got)
	}
}

// TestPartsAreKept is about receivers that compare pointers.
func TestPartsAreKept(t *testing.T) {
	inBubble(t, onlyDNS, withDNS, func(t *testing.T, r *rig) {
		before := r.watcher.State()
		r.put(dnsSlice("kube-dns-a", []string{"10.244.0.9"}))
		synctest.Wait()
		after := r.watcher.State()
		if before == after || before.Guard == after.Guard || before.DNS != after.DNS {
			t.Errorf("before %p %p %p, after %p %p %p", before, before.Guard, before.DNS, after, after.Guard, after.DNS)
		}
		if got := before.Guard.Services[0].Ports[0].Endpoints; len(got) != 2 {
			t.Errorf("the state before has changed: %v", got)
		}
	})
}

// TestUnreadableService: one Service that may not be read, or whose endpoints may
// not, leaves no other unguarded. It is guarded from when it can be read.
func TestUnreadableService(t *testing.T) {
	other := Name{"dns", "other"}
	for _, held := range []string{"services", "endpointslices"} {
		t.Run(held, func(t *testing.T) {
			c := Config{Services: []Name{kubeDNS, other}, DNSService: kubeDNS}
			inBubble(t, c, func(a *apiServer) {
				withDNS(a)
				a.put(dnsService(func(s *corev1.Service) {
					s.Namespace, s.Name = other.Namespace, other.Name
					s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.11", []string{"10.96.0.11"}
				}), dnsSlice("other-a", []string{"10.244.0.9"}, func(s *discoveryv1.EndpointSlice) {
					s.Namespace, s.Labels = other.Namespace, map[string]string{discoveryv1.LabelServiceName: other.Name}
				}))
				refuse := forbidden(held)
				a.refuse = func(r *http.Request) *metav1.Status {
					if !strings.Contains(r.URL.Path, "/namespaces/"+other.Namespace+"/") {
						return nil
					}
					return refuse(r)
				}
			}, func(t *testing.T, r *rig) {
				names := func() (names []string) {
					if g := r.watcher.State().Guard; g != nil {
						for _, s := range g.Services {
							names = append(names, s.Name)
						}
					}
					return names
				}
				r.after(time.Minute)
				if diff := cmp.Diff([]string{kubeDNS.String()}, names()); diff != "" {
					t.Errorf("guarded (-want +got):\n%s", diff)
				}
				if r.watcher.Stats().Synced {
					t.Error("synced, with a Service that cannot be read")
				}
				r.behave(func() { r.refuse = nil })
				r.after(time.Minute)
				if diff := cmp.Diff([]string{other.String(), kubeDNS.String()}, names()); diff != "" {
					t.Errorf("guarded afterwards (-want +got):\n%s", diff)
				}
				// Once known it stays, though it cannot be read any more.
				r.behave(func() { r.refuse = forbidden(held) })
				r.cut()
				r.after(time.Minute)
				if n := len(names()); n != 2 {
					t.Errorf("%d Services guarded once they cannot be read any more", n)
				}
			})
		})
	}
}

// TestOrderOfFirstNews holds back one kind after the other.
func TestOrderOfFirstNews(t *testing.T) {
	for _, held := range []string{"services", "endpointslices"} {
		t.Run(held, func(t *testing.T) {
			inBubble(t, onlyDNS, func(a *apiServer) {
				withDNS(a)
				a.refuse = forbidden(held)
			}, func(t *testing.T, r *rig) {
				r.after(time.Minute)
				s := r.watcher.State()
				if s.Guard != nil {
					t.Errorf("a snapshot without the %s: %+v", held, s.Guard)
				}
				if known := s.DNS != nil; known != (held != "services") {
					t.Errorf("DNS Service known: %v", known)
				}
				r.behave(func() { r.refuse = nil })
				r.after(time.Minute)
				r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
			})
		})
	}
}

func TestNodeAddrs(t *testing.T) {
	nodePort := dnsService(func(s *corev1.Service) {
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30053
	})
	var node atomic.Pointer[[]netip.Addr]
	node.Store(new(addrs("192.0.2.1")))
	var asked atomic.Int32
	c := onlyDNS
	c.NodeAddrs = func() []netip.Addr {
		asked.Add(1)
		return *node.Load()
	}
	inBubble(t, c, func(a *apiServer) { a.put(dnsService(), dnsSlice("a", nil)) }, func(t *testing.T, r *rig) {
		r.after(5 * time.Minute)
		if got := r.watcher.State().Guard.NodeAddrs; got != nil || asked.Load() != 0 {
			t.Errorf("addresses %v, asked %d times, without a node port", got, asked.Load())
		}
		r.put(nodePort)
		synctest.Wait()
		if got := r.watcher.State().Guard.NodeAddrs; !slices.Equal(got, addrs("192.0.2.1")) {
			t.Errorf("addresses %v", got)
		}
		r.tellings()
		node.Store(new(addrs("fd00::1", "192.0.2.2", "::ffff:192.0.2.2")))
		r.after(nodeAddrsInterval)
		if got := r.watcher.State().Guard.NodeAddrs; !slices.Equal(got, addrs("192.0.2.2", "fd00::1")) {
			t.Errorf("addresses %v", got)
		}
		if states, _ := r.tellings(); states != 1 {
			t.Errorf("told %d states", states)
		}
		// They cannot be had: no reason to condemn the flows to them.
		node.Store(new([]netip.Addr))
		r.after(nodeAddrsInterval)
		r.put(dnsSlice("a", []string{"10.244.0.2"}))
		synctest.Wait()
		if got := r.watcher.State().Guard.NodeAddrs; !slices.Equal(got, addrs("192.0.2.2", "fd00::1")) {
			t.Errorf("addresses %v while none can be had", got)
		}
	})
}

// TestMovedEndpoint: the controller writes two slices, and between the two an
// endpoint is in neither. Nobody is told so.
func TestMovedEndpoint(t *testing.T) {
	inBubble(t, onlyDNS, func(a *apiServer) {
		a.put(dnsService(), dnsSlice("a", []string{"10.244.0.2", "10.244.0.3"}), dnsSlice("b", []string{"10.244.0.4"}))
	}, func(t *testing.T, r *rig) {
		const all = "10.244.0.2:53, 10.244.0.3:53, 10.244.0.4:53"
		r.tellings()
		r.put(dnsSlice("a", []string{"10.244.0.3", "10.244.0.4"}))
		r.after(settleTime - time.Millisecond)
		r.wantEndpoints(t, all)
		r.put(dnsSlice("b", []string{"10.244.0.2"}))
		r.after(time.Second)
		r.wantEndpoints(t, all)
		if states, _ := r.tellings(); states != 0 {
			t.Errorf("told %d states", states)
		}

		// One that has gone is told to be gone in time.
		r.put(dnsSlice("a", []string{"10.244.0.3"}))
		r.after(settleTime)
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")

		// One that terminated first is not waited for, nor is any where there is
		// only one slice, be it one for each family.
		r.put(dnsSlice("a", []string{"10.244.0.3"}, func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}), dnsSlice("c", []string{"10.244.0.5"}))
		synctest.Wait()
		r.put(dnsSlice("a", nil))
		synctest.Wait()
		r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.5:53")
		r.put(dnsSlice("b", []string{"10.244.0.2", "10.244.0.6"}), dnsSlice("c", nil), dnsSlice("c6", []string{"fd00::2"}, func(s *discoveryv1.EndpointSlice) {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}))
		r.after(settleTime)
		r.put(dnsSlice("b", []string{"10.244.0.2"}))
		synctest.Wait()
		r.wantEndpoints(t, "10.244.0.2:53, [fd00::2]:53")
	})
}

// TestRenamedPort: the Service's port gets another name, and the slices get it
// later, one after the other. Each endpoint is there all the time.
func TestRenamedPort(t *testing.T) {
	inBubble(t, onlyDNS, func(a *apiServer) {
		a.put(dnsService(), dnsSlice("a", []string{"10.244.0.2"}), dnsSlice("b", []string{"10.244.0.3"}))
	}, func(t *testing.T, r *rig) {
		rename := func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = new("dns-udp") }
		for _, change := range []runtime.Object{
			dnsService(func(s *corev1.Service) { s.Spec.Ports[0].Name = "dns-udp" }),
			dnsSlice("b", []string{"10.244.0.3"}, rename),
			dnsSlice("a", []string{"10.244.0.2"}, rename),
		} {
			r.put(change)
			synctest.Wait()
			r.wantEndpoints(t, "10.244.0.2:53, 10.244.0.3:53")
		}
		if name := r.watcher.State().Guard.Services[0].Ports[0].Name; name != "dns-udp" {
			t.Errorf("port %q", name)
		}
	})
}

// TestDNSServiceAlone watches no more than is asked for.
func TestDNSServiceAlone(t *testing.T) {
	inBubble(t, Config{DNSService: kubeDNS}, withDNS, func(t *testing.T, r *rig) {
		s := r.watcher.State()
		if s.Guard != nil || s.DNS == nil || !slices.Equal(s.DNS.ClusterIPs, addrs("10.96.0.10")) {
			t.Errorf("state %+v", s)
		}
		for _, req := range r.take() {
			if !strings.HasSuffix(req.path, "/services") {
				t.Errorf("asked for %s", req.path)
			}
		}
		// Its address changes.
		r.put(dnsService(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.0.11"} }))
		r.put(dnsSlice("b", nil, func(s *discoveryv1.EndpointSlice) { s.Name = "b" }))
		synctest.Wait()
		if s := r.watcher.State(); !slices.Equal(s.DNS.ClusterIPs, addrs("10.96.0.11")) {
			t.Errorf("state %+v", s)
		}
	})
}
