package kube

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dnsguard/dnsguard/ctguard"
)

var kubeDNS = Name{"kube-system", "kube-dns"}

// dnsService is a kube-dns as kubeadm makes it.
func dnsService(change ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-dns"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53},
				{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53},
				{Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9153},
			},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

// dnsSlice is an EndpointSlice of kube-dns, of endpoints that are ready.
func dnsSlice(name string, addrs []string, change ...func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(53))},
			{Name: new("dns-tcp"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(53))},
			{Name: new("metrics"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(9153))},
		},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{a},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		})
	}
	for _, c := range change {
		c(s)
	}
	return s
}

const thisNode = "node1"

// runningPod is a pod of this node.
func runningPod(namespace, name, ip string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.PodSpec{NodeName: thisNode, DNSPolicy: corev1.DNSClusterFirst},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func namespaceObject(name string, annotations map[string]string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
}

func addrs(texts ...string) []netip.Addr {
	var as []netip.Addr
	for _, s := range texts {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

func serving(addrPort string) ctguard.Endpoint {
	return ctguard.Endpoint{Addr: netip.MustParseAddrPort(addrPort), Serving: true}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
