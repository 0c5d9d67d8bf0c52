// Package e2e holds the tests of dnsguard in a real Kubernetes cluster: etcd,
// kube-apiserver, kube-controller-manager, kube-proxy (iptables and nftables mode)
// and CoreDNS, started in network namespaces by package kubelab, whose doc.go draws
// the laboratory. It is a module of its own, so that none of that is a dependency
// of dnsguard:
//
//	e2e/tools      pins the cluster's programs; built once into .cache/e2e
//	e2e/kubelab    starts them; plays kubelet
//	e2e            the cases
//	e2e/testdata   a c-ares client, compiled by the test
//
// As root, with what "scripts/deps.sh test" installs:
//
//	go test -C e2e -v ./...
//	go test -C e2e -v -run TestMesh .
//
// The first run builds the programs, which takes minutes of two free cores. Then it
// takes some five minutes, of which the laboratory's own start is 5 s, and 3 s for two
// nodes.
//
// # Cases
//
//	TestAnswers      what pods and nodes ask is answered alike with and without
//	                 dnsguard, by nftables and by iptables beside kube-proxy in both
//	                 modes; transports, families; after its death and its end
//	TestMesh         pinned c-ares clients with 1,000 names, and the CoreDNS behind
//	                 their flows dies: an outage without dnsguard, nothing with it
//	TestIncident     pinned clients' recovery, from the pod's deletion, beside both
//	                 modes: kube-proxy's own reconciler, and the guard; also with
//	                 kube-proxy stopped
//	TestOutage       dnsguard killed, hung, replaced, removed under load
//	TestRollout      CoreDNS replaced, and scaled to zero and back, under load
//	TestProxyChange  kube-proxy restarted, and changed to the other mode
//	TestAPIDown      the API server away; dnsguard started without it
//	TestSearch       what glibc finds, with search lists finished by the node or not
//	TestTargetPort   CoreDNS on port 5353, as OpenShift has it
//	TestManifest     deploy/daemonset.yaml as it is, with the DaemonSet controller:
//	                 rights, capabilities, probes, an upgrade under load; bad input:
//	                 rights missing, a ConfigMap with a mistake and rolled in spite of
//	                 it, another node's name, no kube-dns
//	TestOverlays     every overlay, the chart and the monitoring, applied; those whose
//	                 dataplane is here run, from their own command lines and ConfigMaps
//
// Each prints its figures in one line a case. Compare figures of one run only:
// machines differ, and are busy.
package e2e
