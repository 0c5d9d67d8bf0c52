package main

import (
	"net/netip"
	"testing"

	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/resolver/search"
)

// TestSearchListOfClients: whose list is known, and when the name may be gone by.
func TestSearchListOfClients(t *testing.T) {
	pod, host, stranger := netip.MustParseAddr("10.244.0.2"), netip.MustParseAddr("172.30.0.2"), netip.MustParseAddr("10.244.0.99")
	list := new(search.List)
	pods := &kube.State{Clients: map[netip.Addr]*search.List{pod: list, host: nil}}
	tests := map[string]struct {
		watched bool
		state   *kube.State
		client  netip.Addr
		list    *search.List
		known   bool // if not, the list is read off the name
	}{
		"a pod":                           {true, pods, pod, list, true},
		"an address without a list":       {true, pods, host, nil, true},
		"nobody's address":                {true, pods, stranger, nil, true},
		"the API server not heard yet":    {true, nil, pod, nil, true},
		"the pods not read yet":           {true, &kube.State{}, pod, nil, true},
		"no source":                       {false, nil, pod, nil, false},
		"a pod of a file":                 {false, pods, pod, list, true},
		"nobody's address, by a file":     {false, pods, stranger, nil, true},
		"a file that tells of no pod":     {false, &kube.State{Clients: map[netip.Addr]*search.List{}}, stranger, nil, false},
		"pods not watched, only Services": {false, &kube.State{}, stranger, nil, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d := &daemon{}
			d.podsWatched.Store(tt.watched)
			d.cluster.Store(tt.state)
			if got, known := d.searchList(tt.client); got != tt.list || known != tt.known {
				t.Errorf("list %p, known %t, want %p, %t", got, known, tt.list, tt.known)
			}
		})
	}
}
