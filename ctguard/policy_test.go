package ctguard

import (
	"encoding/json"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func endpoint(addr string, serving, terminating *bool) Endpoint {
	return NewEndpoint(netip.MustParseAddrPort(addr), serving, terminating)
}

func addrs(as ...string) (out []netip.Addr) {
	for _, a := range as {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func at(as ...string) map[netip.AddrPort]bool {
	m := make(map[netip.AddrPort]bool)
	for _, a := range as {
		m[netip.MustParseAddrPort(a)] = true
	}
	return m
}

// kubeDNS is the usual Service, with the given endpoints.
func kubeDNS(es ...Endpoint) Service {
	return Service{
		Name:  "kube-system/kube-dns",
		Addrs: addrs("10.96.0.10", "fd00:10:96::a"),
		Ports: []Port{{Name: "dns", Port: 53, Endpoints: es}},
	}
}

func services(ss ...Service) Snapshot { return Snapshot{Services: ss} }

const client = "10.244.1.1:40000"

func TestDecide(t *testing.T) {
	serving := func(a string) Endpoint { return endpoint(a, new(true), new(false)) }
	leaving := func(a string) Endpoint { return endpoint(a, new(true), new(true)) }
	down := func(a string) Endpoint { return endpoint(a, new(false), new(false)) }

	withPorts := func(s Service, ports ...Port) Service { s.Ports = ports; return s }
	zone := func(f Flow, z uint16) Flow { f.Zone = z; return f }
	origZone := func(f Flow, z uint16) Flow { f.Orig.Zone = z; return f }
	proto := func(f Flow, p uint8) Flow { f.Proto = p; return f }
	remaining := func(f Flow, s int) Flow { f.Remaining = time.Duration(s) * time.Second; return f }
	replyTo := func(f Flow, a string) Flow { f.Reply.Dst = netip.MustParseAddrPort(a); return f }
	counted := func(f Flow, packets, replies uint64) Flow { f.Packets, f.Replies = packets, replies; return f }
	unreplied := func(f Flow) Flow { f.SeenReply = false; return f }
	untranslated := func(c, v string) Flow { return flow(c, v, v) }

	exposed := kubeDNS(serving(podA))
	exposed.Addrs = append(exposed.Addrs, addrs("192.0.2.53", "203.0.113.53")...)
	exposed.Ports[0].NodePort = 30053
	nodes := addrs("172.30.0.2", "fd00:172::2")
	exposedHost := kubeDNS(serving("172.30.0.2:53"), serving("172.30.0.3:53"))
	exposedHost.Addrs = append(exposedHost.Addrs, addrs("172.30.0.2", "172.30.0.3", "172.30.0.4")...)

	for _, tt := range []struct {
		name     string
		snapshot Snapshot
		facts    Facts
		flow     Flow
		want     Reason
	}{
		// What is not the guard's.
		{"nothing known", Snapshot{}, Facts{}, flow(client, vip4, podA), NoFrontend},
		{"other Service's address", services(kubeDNS()), Facts{}, flow(client, "10.96.0.11:53", podA), NoFrontend},
		{"B38 130484: other port of the VIP", services(kubeDNS()), Facts{}, flow(client, "10.96.0.10:9153", "10.244.0.9:9153"), NoFrontend},
		{"B38 kpng174: TCP on the same VIP and port", services(kubeDNS()), Facts{}, proto(flow(client, vip4, podA), unix.IPPROTO_TCP), NotUDP},
		{"flow from a frontend", services(kubeDNS()), Facts{}, flow(vip4, client, client), NoFrontend},
		{"direct query to a pod", services(kubeDNS(serving(podA))), Facts{}, flow(client, podA, podA), NoFrontend},

		// Living ones.
		{"serving", services(kubeDNS(serving(podA), serving(podB))), Facts{}, flow(client, vip4, podA), Serving},
		{"IPv6 serving", services(kubeDNS(serving(podA), serving(pod6))), Facts{}, flow("[fd00::1]:4000", vip6, pod6), Serving},
		{"nil conditions serve", services(kubeDNS(endpoint(podA, nil, nil))), Facts{}, flow(client, vip4, podA), Serving},
		{"nil serving, not terminating", services(kubeDNS(endpoint(podA, nil, new(false)))), Facts{}, flow(client, vip4, podA), Serving},
		{"serving, nil terminating", services(kubeDNS(endpoint(podA, new(true), nil))), Facts{}, flow(client, vip4, podA), Serving},
		{"idle for long", services(kubeDNS(serving(podA))), Facts{}, remaining(flow(client, vip4, podA), 1), Serving},
		{"silent but not terminating", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA)}, flow(client, vip4, podA), Serving},
		{"masqueraded", services(kubeDNS(serving(podA))), Facts{}, replyTo(flow(client, vip4, podA), "172.30.0.2:1024"), Serving},
		{"B38 113250: endpoint of another node under Local policy", services(kubeDNS(serving(podA), serving("10.244.9.9:5353"))), Facts{}, flow(client, vip4, "10.244.9.9:5353"), Serving},

		// Endpoints that are gone.
		{"B34: endpoint gone", services(kubeDNS(serving(podB))), Facts{}, flow(client, vip4, podA), EndpointGone},
		{"IPv6 endpoint gone", services(kubeDNS(serving("[fd00:10:244::4]:5353"))), Facts{}, flow("[fd00::1]:4000", vip6, pod6), EndpointGone},
		{"gone, masqueraded, with remapped port", services(kubeDNS(serving(podB))), Facts{}, replyTo(flow(client, vip4, podA), "172.30.0.2:14548"), EndpointGone},
		{"not serving", services(kubeDNS(down(podA), serving(podB))), Facts{}, flow(client, vip4, podA), NotServing},
		{"terminating and not serving", services(kubeDNS(endpoint(podA, new(false), new(true)), serving(podB))), Facts{}, flow(client, vip4, podA), NotServing},
		{"no endpoints left (139628)", services(kubeDNS()), Facts{}, flow(client, vip4, podA), NoEndpoints},
		{"no endpoint serves", services(kubeDNS(down(podA), down(podB))), Facts{}, flow(client, vip4, podA), NoEndpoints},
		{"none of the flow's family", services(kubeDNS(serving(pod6))), Facts{}, flow(client, vip4, podA), NoEndpoints},

		// Endpoints of which no snapshot has said that they serve.
		{"doubt, known before", services(kubeDNS(serving(podB))), Facts{Doubt: true, Met: at(podA, podB)}, flow(client, vip4, podA), EndpointGone},
		{"doubt, not known", services(kubeDNS(serving(podB))), Facts{Doubt: true, Met: at(podB)}, flow(client, vip4, podA), EndpointUnknown},
		{"known before", services(kubeDNS(serving(podB))), Facts{Probes: true, Met: at(podA, podB)}, flow(client, vip4, podA), EndpointGone},
		{"known before, none left", services(kubeDNS()), Facts{Probes: true, Met: at(podA)}, flow(client, vip4, podA), NoEndpoints},
		{"known before, does not serve now", services(kubeDNS(down(podA), serving(podB))), Facts{Probes: true, Met: at(podA, podB)}, flow(client, vip4, podA), NotServing},
		{"not known", services(kubeDNS(serving(podB))), Facts{Probes: true, Met: at(podB)}, flow(client, vip4, podA), EndpointUnknown},
		{"not known, IPv6", services(kubeDNS(serving("[fd00:10:244::4]:5353"))), Facts{Probes: true}, flow("[fd00::1]:4000", vip6, pod6), EndpointUnknown},
		{"not known, none serves", services(kubeDNS()), Facts{Probes: true}, flow(client, vip4, podA), EndpointUnknown},
		{"not known to serve", services(kubeDNS(down(podA), serving(podB))), Facts{Probes: true, Met: at(podB)}, flow(client, vip4, podA), EndpointUnknown},
		{"not known, new target port", services(kubeDNS(serving("10.244.0.3:5354"))), Facts{Probes: true, Met: at("10.244.0.3:5354")}, flow(client, vip4, podA), EndpointUnknown},
		{"not known and mute", services(kubeDNS(serving(podB))), Facts{Probes: true, Met: at(podB), Mute: at(podA)}, flow(client, vip4, podA), EndpointGone},
		{"not known and mute, none serves", services(kubeDNS()), Facts{Probes: true, Mute: at(podA)}, flow(client, vip4, podA), NoEndpoints},
		{"not known to serve and mute", services(kubeDNS(down(podA), serving(podB))), Facts{Probes: true, Mute: at(podA)}, flow(client, vip4, podA), NotServing},
		{"mute, now it serves", services(kubeDNS(serving(podA))), Facts{Probes: true, Met: at(podA), Mute: at(podA)}, flow(client, vip4, podA), Serving},
		{"not known, at a tombstone", Snapshot{}, Facts{Probes: true, Tombstones: []Frontend{{Addr: netip.MustParseAddrPort(vip4)}}}, flow(client, vip4, podA), FrontendGone},
		{"never translated is not unknown", services(kubeDNS(serving(podA))), Facts{Probes: true, Translated: at(vip4)}, untranslated(client, vip4), Untranslated},

		// Target ports.
		{"OpenShift: target port 5353", services(kubeDNS(serving("10.128.0.5:5353"))), Facts{}, flow(client, vip4, "10.128.0.5:5353"), Serving},
		{"B38 130542: target port changed", services(kubeDNS(serving("10.244.0.3:5354"))), Facts{}, flow(client, vip4, podA), PortChanged},
		{
			"named target port differs from pod to pod", services(kubeDNS(serving("10.244.0.3:8053"), serving("10.244.0.4:5353"))),
			Facts{},
			flow(client, vip4, "10.244.0.4:5353"), Serving,
		},
		{
			"and is compared for each pod", services(kubeDNS(serving("10.244.0.3:8053"), serving("10.244.0.4:5353"))),
			Facts{},
			flow(client, vip4, "10.244.0.4:8053"), PortChanged,
		},
		{
			"two UDP ports with one target each", services(withPorts(
				kubeDNS(),
				Port{Name: "dns", Port: 53, Endpoints: []Endpoint{serving("10.244.0.3:53")}},
				Port{Name: "alt", Port: 5300, Endpoints: []Endpoint{serving("10.244.0.3:5353")}},
			)),
			Facts{},
			flow(client, "10.96.0.10:5300", "10.244.0.3:53"), PortChanged,
		},
		{
			"two UDP ports with the same target", services(withPorts(
				kubeDNS(),
				Port{Name: "dns", Port: 53, Endpoints: []Endpoint{serving(podA)}},
				Port{Name: "alt", Port: 5300, Endpoints: []Endpoint{serving(podA)}},
			)),
			Facts{},
			flow(client, "10.96.0.10:5300", podA), Serving,
		},

		// Other ways to a Service.
		{"B38 65228: load balancer address, serving", services(exposed), Facts{}, flow(client, "192.0.2.53:53", podA), Serving},
		{"B38 65228: load balancer address, gone", services(exposed), Facts{}, flow(client, "192.0.2.53:53", podB), EndpointGone},
		{"B38 103857: external address, gone", services(exposed), Facts{}, flow(client, "203.0.113.53:53", podB), EndpointGone},
		{"B38 59368: node port, serving", Snapshot{[]Service{exposed}, nodes}, Facts{}, flow(client, "172.30.0.2:30053", podA), Serving},
		{"B38 59368: node port, gone", Snapshot{[]Service{exposed}, nodes}, Facts{}, flow(client, "172.30.0.2:30053", podB), EndpointGone},
		{"endpoint on the host's network that is its own load balancer address", services(exposedHost), Facts{Translated: at("172.30.0.2:53")}, untranslated(client, "172.30.0.2:53"), Serving},
		{"another such endpoint", services(exposedHost), Facts{Translated: at("172.30.0.2:53")}, flow(client, "172.30.0.2:53", "172.30.0.3:53"), Serving},
		{"its address, no longer an endpoint", services(exposedHost), Facts{Translated: at("172.30.0.4:53")}, untranslated(client, "172.30.0.4:53"), Untranslated},
		{"node port number at a foreign address", Snapshot{[]Service{exposed}, nodes}, Facts{}, flow(client, "198.51.100.1:30053", podB), NoFrontend},
		{"Service port at a node address", Snapshot{[]Service{exposed}, nodes}, Facts{}, flow(client, "172.30.0.2:53", podB), NoFrontend},
		{"node port at the cluster IP", Snapshot{[]Service{exposed}, nodes}, Facts{}, flow(client, "10.96.0.10:30053", podB), NoFrontend},
		{
			"two Services share a load balancer address", services(
				Service{Name: "a", Addrs: addrs("192.0.2.53"), Ports: []Port{{Name: "dns", Port: 53, Endpoints: []Endpoint{serving(podA)}}}},
				Service{Name: "b", Addrs: addrs("192.0.2.53"), Ports: []Port{{Name: "dns", Port: 53, Endpoints: []Endpoint{serving(podB)}}}},
			),
			Facts{},
			flow(client, "192.0.2.53:53", podB), Serving,
		},

		// Never translated.
		{"B35: not translated, an endpoint serves", services(kubeDNS(serving(podA))), Facts{Translated: at(vip4)}, untranslated(client, vip4), Untranslated},
		{"not translated, none serves", services(kubeDNS()), Facts{Translated: at(vip4)}, untranslated(client, vip4), UntranslatedHeld},
		{"not translated, nor any other", services(kubeDNS(serving(podA))), Facts{}, untranslated(client, vip4), UntranslatedHeld},
		{"not translated, others to another frontend", services(kubeDNS(serving(podA))), Facts{Translated: at(vip6)}, untranslated(client, vip4), UntranslatedHeld},
		{"not translated, only the other family serves", services(kubeDNS(serving(pod6))), Facts{Translated: at(vip4)}, untranslated(client, vip4), UntranslatedHeld},
		{"not translated, at a tombstone", Snapshot{}, Facts{Translated: at(vip4), Tombstones: []Frontend{{Addr: netip.MustParseAddrPort(vip4)}}}, untranslated(client, vip4), UntranslatedHeld},
		{"not translated node port", Snapshot{[]Service{exposed}, nodes}, Facts{Translated: at("172.30.0.2:30053")}, untranslated(client, "172.30.0.2:30053"), Untranslated},

		// Tombstones.
		{"deleted Service (141371)", Snapshot{}, Facts{Tombstones: []Frontend{{Addr: netip.MustParseAddrPort(vip4)}}}, flow(client, vip4, podA), FrontendGone},
		{
			"changed cluster IP: the old one", services(kubeDNS(serving(podA))),
			Facts{Tombstones: []Frontend{{Addr: netip.MustParseAddrPort("10.96.0.99:53")}}},
			flow(client, "10.96.0.99:53", podA), FrontendGone,
		},
		{
			"Service is back under the same address", services(kubeDNS(serving(podA))),
			Facts{Tombstones: []Frontend{{Addr: netip.MustParseAddrPort(vip4)}}},
			flow(client, vip4, podA), Serving,
		},

		// Terminating but serving.
		{"B33: lame duck, flow in use", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 119), TerminatingBusy},
		{"lame duck, idle for 3 s as far as is known", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 116), TerminatingIdle},
		{"lame duck, idle for less", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 117), TerminatingBusy},
		{"lame duck, young flow in use", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 29), TerminatingBusy},
		{"lame duck, young idle flow", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 26), TerminatingIdle},
		{
			"lame duck, other timeouts", services(kubeDNS(leaving(podA), serving(podB))),
			Facts{Timeouts: Timeouts{Unreplied: 10 * time.Second, Stream: 20 * time.Second}},
			remaining(flow(client, vip4, podA), 17), TerminatingBusy,
		},
		{"lame duck, timeout longer than any known", services(kubeDNS(leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 3600), TerminatingBusy},
		{"dead while terminating", services(kubeDNS(leaving(podA), serving(podB))), Facts{Silent: at(podA)}, remaining(flow(client, vip4, podA), 119), TerminatingSilent},
		{"the other one is dead", services(kubeDNS(leaving(podA), serving(podB))), Facts{Silent: at(podB)}, remaining(flow(client, vip4, podA), 119), TerminatingBusy},
		{"all terminate: idle flow stays", services(kubeDNS(leaving(podA), leaving(podB))), Facts{}, remaining(flow(client, vip4, podA), 50), TerminatingLast},
		{"all terminate, this one dead", services(kubeDNS(leaving(podA), leaving(podB))), Facts{Silent: at(podA)}, flow(client, vip4, podA), TerminatingSilent},
		{"all terminate, all dead", services(kubeDNS(leaving(podA), leaving(podB))), Facts{Silent: at(podA, podB)}, flow(client, vip4, podA), TerminatingLast},
		{"the last one terminates and is dead", services(kubeDNS(leaving(podA), down(podB))), Facts{Silent: at(podA)}, flow(client, vip4, podA), TerminatingLast},

		// Evidence against an endpoint that is ready.
		{"ready and dead, waiting for a reply", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA), Evidence: true}, counted(flow(client, vip4, podA), 5, 2), Unanswered},
		{"ready and dead, never replied", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA), Evidence: true}, unreplied(flow(client, vip4, podA)), Unanswered},
		{"ready and dead, nothing asked since", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA), Evidence: true}, counted(flow(client, vip4, podA), 5, 5), Serving},
		{"ready and dead, the last", services(kubeDNS(serving(podA), down(podB))), Facts{Silent: at(podA), Evidence: true}, counted(flow(client, vip4, podA), 5, 2), Serving},
		{"all ready and dead", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA, podB), Evidence: true}, counted(flow(client, vip4, podA), 5, 2), Serving},
		{"ready and dead, the other terminates", services(kubeDNS(serving(podA), leaving(podB))), Facts{Silent: at(podA), Evidence: true}, counted(flow(client, vip4, podA), 5, 2), Serving},
		{"ready and dead, no evidence wanted", services(kubeDNS(serving(podA), serving(podB))), Facts{Silent: at(podA)}, counted(flow(client, vip4, podA), 5, 2), Serving},
		{"dead while terminating, the other ready and dead", services(kubeDNS(leaving(podA), serving(podB))), Facts{Silent: at(podA, podB), Evidence: true}, flow(client, vip4, podA), TerminatingLast},

		// Zones.
		{"zone of someone else's", services(kubeDNS(serving(podB))), Facts{}, zone(flow(client, vip4, podA), 65520), OtherZone},
		{"B40: zone of the original direction, not ours", services(kubeDNS(serving(podB))), Facts{}, origZone(flow(client, vip4, podA), 1), OtherZone},
		{"link-local fallback's zone, gone", services(kubeDNS(serving(podB))), Facts{Zones: []uint16{5353}}, origZone(flow(client, vip4, podA), 5353), EndpointGone},
		{"link-local fallback's zone, serving", services(kubeDNS(serving(podA))), Facts{Zones: []uint16{5353}}, origZone(flow(client, vip4, podA), 5353), Serving},

		// IPVS.
		{"IPVS keeps its own table", services(kubeDNS(serving(podB))), Facts{IPVS: at(vip4)}, flow(client, vip4, podA), IPVSHeld},
		{"IPVS for the other family only", services(kubeDNS(serving(podB))), Facts{IPVS: at(vip6)}, flow(client, vip4, podA), EndpointGone},

		// What should not be in a snapshot.
		{"duplicate endpoint, one of them serving", services(kubeDNS(down(podA), serving(podA))), Facts{}, flow(client, vip4, podA), Serving},
		{"duplicate endpoint, one of them staying", services(kubeDNS(serving(podA), leaving(podA), serving(podB))), Facts{}, remaining(flow(client, vip4, podA), 50), Serving},
		{"endpoint without an address", services(kubeDNS(Endpoint{Serving: true}, serving(podA))), Facts{}, flow(client, vip4, podB), EndpointGone},
		{"endpoint as an IPv4-mapped address", services(kubeDNS(serving("[::ffff:10.244.0.3]:5353"))), Facts{}, flow(client, vip4, podA), Serving},
		{"endpoint with port 0", services(kubeDNS(serving("10.244.0.3:0"))), Facts{}, flow(client, vip4, podA), NoEndpoints},
		{"Service without an address", services(Service{Name: "x", Addrs: []netip.Addr{{}}, Ports: []Port{{Port: 53}}}), Facts{}, flow(client, vip4, podA), NoFrontend},
		{"Service with an unspecified address", services(Service{Name: "x", Addrs: addrs("0.0.0.0"), Ports: []Port{{Port: 53}}}), Facts{}, flow(client, "0.0.0.0:53", podA), NoFrontend},
		{"Service without ports", services(Service{Name: "x", Addrs: addrs("10.96.0.10")}), Facts{}, flow(client, vip4, podA), NoFrontend},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v, r := NewPolicy(tt.snapshot, tt.facts).Decide(tt.flow)
			if r != tt.want || v != tt.want.Verdict() {
				t.Errorf("Decide(%v) = %v, %v; want %v, %v", tt.flow, v, r, tt.want.Verdict(), tt.want)
			}
		})
	}
}

func TestReasons(t *testing.T) {
	for r := range reasons {
		if r.String() == "unknown" || r.String() == "" {
			t.Errorf("reason %d has no name", r)
		}
	}
	for _, r := range StaleReasons() {
		if r.Verdict() != Stale {
			t.Errorf("%v is %v", r, r.Verdict())
		}
	}
	want := map[Verdict]int{Foreign: 3, Live: 1, Held: 5, Stale: 9}
	got := make(map[Verdict]int)
	for r := range reasons {
		got[r.Verdict()]++
		if r.certain() && r.Verdict() != Stale {
			t.Errorf("%v is certain, but not stale", r)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reasons by verdict (-want +got):\n%s", diff)
	}
	for _, v := range append(Verdicts(), Foreign) {
		if got[v] == 0 || v.String() == "unknown" {
			t.Errorf("verdict %d", v)
		}
	}
	for s := Waiting; s <= Guarding; s++ {
		if s.String() == "unknown" || s.Message() == "" {
			t.Errorf("state %d has no name", s)
		}
	}
	if s := Guarding + 1; s.String() != "unknown" || reasons.String() != "unknown" || Verdict(9).String() != "unknown" {
		t.Error("what does not exist has a name")
	}
	b, err := json.Marshal(struct {
		V Verdict
		R Reason
		S State
	}{Stale, EndpointGone, Guarding})
	if want := `{"V":"stale","R":"endpoint-gone","S":"guarding"}`; err != nil || string(b) != want {
		t.Errorf("JSON %s, %v", b, err)
	}
}

func TestMatches(t *testing.T) {
	withAddrs := func(as ...string) Service {
		s := kubeDNS()
		s.Addrs = addrs(as...)
		return s
	}
	both := kubeDNS()
	both.Ports[0].NodePort = 30053
	for _, tt := range []struct {
		name     string
		snapshot Snapshot
		want     []Match
	}{
		{"nothing", Snapshot{}, nil},
		{"dual stack", services(kubeDNS()), []Match{match(vip4), match(vip6)}},
		{"two IPv4 addresses: two walks", services(withAddrs("10.96.0.10", "192.0.2.53")), []Match{match(vip4), match("192.0.2.53:53")}},
		{"more: one walk", services(withAddrs("10.96.0.10", "192.0.2.53", "203.0.113.1")), []Match{match("0.0.0.0:53")}},
		{"two IPv6 addresses: one walk", services(withAddrs("fd00::1", "fd00::2")), []Match{match("[::]:53")}},
		{
			"node ports apart",
			Snapshot{[]Service{both}, addrs("172.30.0.2", "172.30.1.2", "10.0.0.1")},
			[]Match{match("0.0.0.0:30053"), match(vip4), match(vip6)},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, NewPolicy(tt.snapshot, Facts{}).matches(), compareAddrs); diff != "" {
				t.Errorf("matches (-want +got):\n%s", diff)
			}
		})
	}
}

func TestIdle(t *testing.T) {
	for _, tt := range []struct {
		name      string
		remaining int
		want      int
	}{
		{"just refreshed stream", 120, 0},
		{"rounded down", 119, 0},
		{"stream idle", 100, 19},
		{"long idle stream, or a young flow: the shorter", 29, 0},
		{"young flow idle", 20, 9},
		{"about to expire", 0, 29},
		{"longer than any timeout", 600, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := DefaultTimeouts().Idle(Flow{Remaining: time.Duration(tt.remaining) * time.Second})
			if got != time.Duration(tt.want)*time.Second {
				t.Errorf("idle %v, want %d s", got, tt.want)
			}
		})
	}
}

// TestIdleIsALowerBound: whatever the timeouts are, a flow is not idle for longer
// than it has been, whichever of them it was given.
func TestIdleIsALowerBound(t *testing.T) {
	for _, ts := range []Timeouts{
		DefaultTimeouts(),
		{Unreplied: 30 * time.Second, Stream: 15 * time.Second},
		{Unreplied: 10 * time.Second, Stream: 10 * time.Second},
		{Unreplied: 60 * time.Second, Stream: 180 * time.Second},
	} {
		for _, given := range []time.Duration{ts.Unreplied, ts.Stream} {
			for idle := time.Duration(0); idle <= given; idle += time.Second {
				if got := ts.Idle(Flow{Remaining: given - idle}); got > idle {
					t.Errorf("%v: idle for %v of %v, taken for %v", ts, idle, given, got)
				}
			}
		}
	}
}

// FuzzDecide builds a snapshot and a flow from few values, so that they meet
// often, and checks what must hold whatever they are.
func FuzzDecide(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b) % n
		}
		pool := []netip.Addr{
			{},
			netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1"),
			netip.MustParseAddr("fd00::2"), netip.MustParseAddr("::ffff:10.0.0.1"), netip.MustParseAddr("fe80::1%eth0"),
			netip.IPv4Unspecified(),
		}
		addr := func() netip.Addr { return pool[next(len(pool))] }
		port := func() uint16 { return []uint16{0, 53, 5353, 30053}[next(4)] }
		at := func() netip.AddrPort { return netip.AddrPortFrom(addr(), port()) }
		some := func() map[netip.AddrPort]bool { return map[netip.AddrPort]bool{at(): true, at(): true} }

		var s Snapshot
		for range next(3) {
			svc := Service{Name: "s", Addrs: []netip.Addr{addr(), addr()}}
			for range next(3) {
				p := Port{Name: "p", Port: port(), NodePort: port()}
				for range next(5) {
					p.Endpoints = append(p.Endpoints, Endpoint{at(), next(2) == 0, next(2) == 0})
				}
				svc.Ports = append(svc.Ports, p)
			}
			s.Services = append(s.Services, svc)
		}
		s.NodeAddrs = []netip.Addr{addr()}
		facts := Facts{Evidence: next(4) == 3, Zones: []uint16{uint16(next(3))}, Translated: some(), Silent: some(), Doubt: next(4) == 3, Probes: next(4) == 3, Met: some(), Mute: some(), Tombstones: []Frontend{{Addr: at()}}}
		fl := Flow{
			Proto: []uint8{17, 6}[next(2)], Orig: Tuple{at(), at(), uint16(next(2))}, Reply: Tuple{at(), at(), 0},
			Zone: uint16(next(3)), Remaining: time.Duration(next(200)) * time.Second,
		}

		p := NewPolicy(s, facts)
		v, r := p.Decide(fl)
		if v != r.Verdict() || r >= reasons {
			t.Fatalf("verdict %v for reason %v", v, r)
		}
		if v2, r2 := NewPolicy(s, facts).Decide(fl); v != v2 || r != r2 {
			t.Fatalf("not the same twice: %v, %v", r, r2)
		}
		// Said once more, naively: is there an endpoint behind the flow's
		// frontend that serves, and does one of these stay?
		same := func(a netip.Addr, port uint16, b netip.AddrPort) bool {
			return a.IsValid() && !a.IsUnspecified() && port != 0 && netip.AddrPortFrom(a.Unmap().WithZone(""), port) == b
		}
		serving, staying := false, false
		for _, svc := range s.Services {
			for _, port := range svc.Ports {
				to := false
				for _, a := range svc.Addrs {
					to = to || same(a, port.Port, fl.Orig.Dst)
				}
				for _, a := range s.NodeAddrs {
					to = to || same(a, port.NodePort, fl.Orig.Dst)
				}
				for _, e := range port.Endpoints {
					if to && e.Serving && same(e.Addr.Addr(), e.Addr.Port(), fl.Reply.Src) {
						serving = true
						staying = staying || !e.Terminating
					}
				}
			}
		}
		sameFamily := fl.Reply.Src.Addr().Is4() == fl.Orig.Dst.Addr().Is4()
		if v == Stale && staying && sameFamily && !(r == Unanswered && facts.Silent[fl.Reply.Src]) {
			t.Fatalf("a flow to an endpoint that serves and stays is %v: %v", r, fl)
		}
		if v == Stale && r != FrontendGone && r != Untranslated && !serving && (facts.Doubt || facts.Probes) && !facts.Met[fl.Reply.Src] && !facts.Mute[fl.Reply.Src] {
			t.Fatalf("a flow to an endpoint that is not known is %v: %v", r, fl)
		}
		if v == Live && !serving {
			t.Fatalf("no such endpoint: %v", fl)
		}
		if v != Foreign {
			if fl.Proto != 17 {
				t.Fatalf("not UDP: %v", v)
			}
			covered := false
			for _, m := range p.matches() {
				covered = covered || m.Matches(fl)
			}
			if !covered {
				t.Fatalf("flow %v gets %v, but no dump would find it: %v", fl, r, p.matches())
			}
		}
	})
}
