package kube

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/dnsguard/dnsguard/ctguard"
)

// equateComparable lets cmp compare addresses.
var equateComparable = cmpopts.EquateComparable(ctguard.Endpoint{}, addrs("::1")[0])

func TestServices(t *testing.T) {
	dns := ctguard.Port{Name: "dns", Port: 53}
	tests := []struct {
		name   string
		object *corev1.Service
		addrs  []string
		ports  []ctguard.Port
		dns    DNSService
	}{
		{
			"kubeadm", dnsService(),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"dual stack, IPv6 first", dnsService(func(s *corev1.Service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "fd00:10:96::a", []string{"fd00:10:96::a", "10.96.0.10"}
			}),
			[]string{"fd00:10:96::a", "10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("fd00:10:96::a", "10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"clusterIP alone, as before dual stack", dnsService(func(s *corev1.Service) { s.Spec.ClusterIPs = nil }),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"no TCP", dnsService(func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[:1] }),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("10.96.0.10"), []uint16{53}, nil},
		},
		{
			"no UDP", dnsService(func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[1:] }),
			[]string{"10.96.0.10"},
			nil,
			DNSService{ClusterIPs: addrs("10.96.0.10")},
		},
		{
			"no ports at all", dnsService(func(s *corev1.Service) { s.Spec.Ports = nil }),
			[]string{"10.96.0.10"},
			nil,
			DNSService{ClusterIPs: addrs("10.96.0.10")},
		},
		{
			"protocol left out is TCP", dnsService(func(s *corev1.Service) { s.Spec.Ports[1].Protocol = "" }),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"two UDP ports", dnsService(func(s *corev1.Service) {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "alt", Protocol: corev1.ProtocolUDP, Port: 5353})
			}),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns, {Name: "alt", Port: 5353}},
			DNSService{addrs("10.96.0.10"), []uint16{53, 5353}, []uint16{53}},
		},
		{
			"a port without a name", dnsService(func(s *corev1.Service) {
				s.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 53}}
			}),
			[]string{"10.96.0.10"},
			[]ctguard.Port{{Port: 53}},
			DNSService{addrs("10.96.0.10"), []uint16{53}, nil},
		},
		{
			"NodePort", dnsService(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30053
			}),
			[]string{"10.96.0.10"},
			[]ctguard.Port{{Name: "dns", Port: 53, NodePort: 30053}},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"LoadBalancer", dnsService(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeLoadBalancer, 30053
				s.Spec.ExternalIPs = []string{"192.0.2.1", "10.96.0.10"}
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
					{IP: "192.0.2.2"},
					{IP: "192.0.2.3", IPMode: new(corev1.LoadBalancerIPModeVIP)},
					{IP: "192.0.2.4", IPMode: new(corev1.LoadBalancerIPModeProxy)},
					{Hostname: "lb.example.net"},
					{IP: "192.0.2.1"},
				}
			}),
			[]string{"10.96.0.10", "192.0.2.1", "192.0.2.2", "192.0.2.3"},
			[]ctguard.Port{{Name: "dns", Port: 53, NodePort: 30053}},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"headless", dnsService(func(s *corev1.Service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"}
				s.Spec.ExternalIPs = []string{"192.0.2.1"}
			}),
			nil, nil,
			DNSService{},
		},
		{
			"ExternalName", dnsService(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "dns.example.net"
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil
				s.Spec.ExternalIPs = []string{"192.0.2.1"}
			}),
			nil, nil,
			DNSService{},
		},
		{
			"no address yet", dnsService(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }),
			nil, nil,
			DNSService{},
		},
		{
			"IPv4 with leading zeros is decimal, as for kube-proxy", dnsService(func(s *corev1.Service) {
				s.Spec.ClusterIPs = []string{"10.096.000.010"}
			}),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns},
			DNSService{addrs("10.96.0.10"), []uint16{53}, []uint16{53}},
		},
		{
			"what is no address or port is left out", dnsService(func(s *corev1.Service) {
				s.Spec.ClusterIPs = []string{"10.96.0.10", "10.96.0.300", "", "0.0.0.0", "fe80::1%eth0"}
				s.Spec.Ports = append(s.Spec.Ports,
					corev1.ServicePort{Name: "none", Protocol: corev1.ProtocolUDP},
					corev1.ServicePort{Name: "large", Protocol: corev1.ProtocolUDP, Port: 65536 + 53},
					corev1.ServicePort{Name: "node", Protocol: corev1.ProtocolUDP, Port: 54, NodePort: 65536 + 54},
				)
			}),
			[]string{"10.96.0.10"},
			[]ctguard.Port{dns, {Name: "node", Port: 54}},
			DNSService{addrs("10.96.0.10"), []uint16{53, 54}, []uint16{53}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newService(tt.object)
			got := guarded(kubeDNS, s, nil)
			want := ctguard.Service{Name: "kube-system/kube-dns", Addrs: addrs(tt.addrs...), Ports: tt.ports}
			if diff := cmp.Diff(want, got, equateComparable, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("service (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.dns, s.dns(), equateComparable, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("dns (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	type sliceOf = *discoveryv1.EndpointSlice
	oneWith := func(c discoveryv1.EndpointConditions) []sliceOf {
		return []sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Endpoints[0].Conditions = c })}
	}
	one := func(serving, terminating bool) []ctguard.Endpoint {
		e := ctguard.Endpoint{Addr: addrPort("10.244.0.2:53"), Serving: serving, Terminating: terminating}
		return []ctguard.Endpoint{e}
	}
	tests := []struct {
		name   string
		slices []sliceOf
		port   string // "dns" if empty
		want   []ctguard.Endpoint
	}{
		{"none", nil, "", nil},
		{"a slice without endpoints", []sliceOf{dnsSlice("a", nil)}, "", nil},
		{"a slice without ports", []sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports = nil })}, "", nil},
		{"nil conditions", oneWith(discoveryv1.EndpointConditions{}), "", one(true, false)},
		{"ready only", oneWith(discoveryv1.EndpointConditions{Ready: new(true)}), "", one(true, false)},
		{"not ready, serving not known", oneWith(discoveryv1.EndpointConditions{Ready: new(false)}), "", one(true, false)},
		{"not ready, serving", oneWith(discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true)}), "", one(true, false)},
		{"not serving", oneWith(discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false)}), "", one(false, false)},
		{
			"ready by publishNotReadyAddresses, not serving",
			oneWith(discoveryv1.EndpointConditions{Ready: new(true), Serving: new(false)}), "", one(true, true),
		},
		{
			"the same, terminating",
			oneWith(discoveryv1.EndpointConditions{Ready: new(true), Serving: new(false), Terminating: new(true)}), "", one(true, true),
		},
		{
			"lame duck", oneWith(discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}),
			"", one(true, true),
		},
		{
			"target port of OpenShift",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Port = new(int32(5353)) })},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:5353")},
		},
		{
			"a named target port that differs from pod to pod",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.2"}),
				dnsSlice("b", []string{"10.244.0.3"}, func(s sliceOf) { s.Ports[0].Port = new(int32(8053)) }),
			},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53"), serving("10.244.0.3:8053")},
		},
		{
			"two ports of one target",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
				s.Ports = append(s.Ports, discoveryv1.EndpointPort{
					Name: new("alt"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(53)),
				})
			})},
			"alt",
			[]ctguard.Endpoint{serving("10.244.0.2:53")},
		},
		{"TCP ports have no endpoints", []sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports = s.Ports[1:] })}, "dns-tcp", nil},
		{
			"renamed, the slices have the old name",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}), dnsSlice("b", []string{"10.244.0.3"})},
			"dns-udp",
			[]ctguard.Endpoint{serving("10.244.0.2:53"), serving("10.244.0.3:53")},
		},
		{
			"renamed, one of the slices has the old name",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.2"}),
				dnsSlice("b", []string{"10.244.0.3"}, func(s sliceOf) { s.Ports[0].Name = new("dns-udp") }),
			},
			"dns-udp",
			[]ctguard.Endpoint{serving("10.244.0.2:53"), serving("10.244.0.3:53")},
		},
		{
			"another port of the Service has other endpoints",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.2"}),
				dnsSlice("b", []string{"10.244.0.3"}, func(s sliceOf) { s.Ports[0].Name = new("alt") }),
			},
			"alt",
			[]ctguard.Endpoint{serving("10.244.0.3:53")},
		},
		{
			"another port of the Service has the only endpoints",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"})},
			"alt", nil,
		},
		{
			"a port of the same name for TCP",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
				s.Ports[1].Name, s.Ports[1].Port = new("dns"), new(int32(5300))
			})},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53")},
		},
		{
			"a port without a name",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Name = nil })},
			"", nil,
		},
		{
			"the name of an only port is empty",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
				s.Ports = s.Ports[:1]
				s.Ports[0].Name = new("")
			})},
			"-",
			[]ctguard.Endpoint{serving("10.244.0.2:53")},
		},
		{
			"a port without a number is all ports",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Port = nil })},
			"", nil,
		},
		{
			"a port without a protocol",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Protocol = nil })},
			"", nil,
		},
		{
			"a number that is no port",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Port = new(int32(0)) })},
			"", nil,
		},
		{
			"only the first address counts",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
				s.Endpoints[0].Addresses = append(s.Endpoints[0].Addresses, "10.244.0.99")
			})},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53")},
		},
		{
			"an endpoint without an address",
			[]sliceOf{dnsSlice("a", []string{"10.244.0.2", "10.244.0.3"}, func(s sliceOf) {
				s.Endpoints[0].Addresses = nil
			})},
			"",
			[]ctguard.Endpoint{serving("10.244.0.3:53")},
		},
		{
			"dual stack",
			[]sliceOf{
				dnsSlice("b", []string{"fd00::2"}, func(s sliceOf) { s.AddressType = discoveryv1.AddressTypeIPv6 }),
				dnsSlice("a", []string{"10.244.0.2"}),
			},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53"), serving("[fd00::2]:53")},
		},
		{
			"addresses of the wrong family",
			[]sliceOf{
				dnsSlice("a", []string{"fd00::2", "10.244.0.2"}),
				dnsSlice("b", []string{"10.244.0.3", "::ffff:10.244.0.4"}, func(s sliceOf) { s.AddressType = discoveryv1.AddressTypeIPv6 }),
			},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53")},
		},
		{
			"FQDN",
			[]sliceOf{dnsSlice("a", []string{"dns.example.net", "10.244.0.2"}, func(s sliceOf) { s.AddressType = discoveryv1.AddressTypeFQDN })},
			"", nil,
		},
		{
			"twice in one slice and again in another",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.3", "10.244.0.2", "10.244.0.3"}),
				dnsSlice("b", []string{"10.244.0.3"}),
			},
			"",
			[]ctguard.Endpoint{serving("10.244.0.2:53"), serving("10.244.0.3:53")},
		},
		{
			"twice with different conditions",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
					s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Serving: new(false), Terminating: new(true)}
				}),
				dnsSlice("b", []string{"10.244.0.2"}),
			},
			"", one(true, false),
		},
		{
			"one address, two target ports, while they change",
			[]sliceOf{
				dnsSlice("a", []string{"10.244.0.2"}, func(s sliceOf) {
					s.Endpoints[0].Conditions.Ready, s.Endpoints[0].Conditions.Serving = new(false), new(false)
				}),
				dnsSlice("b", []string{"10.244.0.2"}, func(s sliceOf) { s.Ports[0].Port = new(int32(5353)) }),
			},
			"",
			[]ctguard.Endpoint{{Addr: addrPort("10.244.0.2:53")}, serving("10.244.0.2:5353")},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var kept []slice
			for _, s := range tt.slices {
				kept = append(kept, newSlice(s))
			}
			port := tt.port
			switch port {
			case "":
				port = "dns"
			case "-":
				port = ""
			}
			ports := []servicePort{{name: port, udp: true}, {name: "dns", udp: true}, {name: "alt", udp: true}}
			if strings.HasPrefix(tt.name, "renamed") {
				ports = ports[:1]
			}
			if diff := cmp.Diff(tt.want, endpoints(kept, port, ports), equateComparable, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("endpoints (-want +got):\n%s", diff)
			}
		})
	}
}
