package resolver

import (
	"maps"
	"testing"
	"testing/synctest"
)

// TestAbsentPod: a client that asks for a pod of its namespace by the pod's whole
// name is not sent abroad while the pod is away, as long as there is its Service.
// A client that searches finds by itself what it always would.
func TestAbsentPod(t *testing.T) {
	const (
		pod  = "web-3.web.shop.svc.cluster.local."
		node = "NOERROR | " + pod + " CNAME web-3.web.node.example. | web-3.web.node.example. A 192.0.2.1"
	)
	abroad := zone{"web-3.web.node.example.": "A", "web-3.web.": "A"}
	tests := map[string]struct {
		asked string // if not pod
		zone  zone
		want  string // to A
		steps bool   // the client's own way ends in the node's domain
	}{
		"there is its Service":             {zone: zone{"web.shop.svc.cluster.local.": "A"}, want: "NXDOMAIN", steps: true},
		"without addresses":                {zone: zone{"web.shop.svc.cluster.local.": "nothing"}, want: "NXDOMAIN", steps: true},
		"or there may be":                  {zone: zone{"web.shop.svc.cluster.local.": "fails"}, want: "NXDOMAIN", steps: true},
		"and the first name abroad fails":  {zone: zone{"web.shop.svc.cluster.local.": "A", "web-3.web.node.example.": "fails"}, want: "NXDOMAIN"},
		"and that has no addresses":        {zone: zone{"web.shop.svc.cluster.local.": "A", "web-3.web.node.example.": "nothing"}, want: "NXDOMAIN"},
		"there is none":                    {want: node},
		"of another namespace":             {zone: zone{"web.other.svc.cluster.local.": "A"}, want: node},
		"the pod is there":                 {zone: zone{pod: "A"}, want: "NOERROR | " + pod + " A 192.0.2.1"},
		"a name in the cluster comes next": {zone: zone{"web.shop.svc.cluster.local.": "A", "web-3.web.cluster.local.": "A"}, want: "NOERROR | " + pod + " CNAME web-3.web.cluster.local. | web-3.web.cluster.local. A 192.0.2.1"},
		"no name of a pod": {
			asked: "www.web-3.web.shop.svc.cluster.local.", zone: zone{"web.shop.svc.cluster.local.": "A", "www.web-3.web.": "A"},
			want: "NOERROR | www.web-3.web.shop.svc.cluster.local. CNAME www.web-3.web. | www.web-3.web. A 192.0.2.1",
		},
		// A libc that searches for web-3.web.shop.svc comes by there, too.
		"searched for as svc.ns.svc": {
			asked: "web-3.web.shop.svc.shop.svc.cluster.local.", zone: zone{"web.shop.svc.cluster.local.": "A", "web-3.web.shop.svc.node.example.": "A"},
			want: "NOERROR | web-3.web.shop.svc.shop.svc.cluster.local. CNAME web-3.web.shop.svc.node.example. | web-3.web.shop.svc.node.example. A 192.0.2.1",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				z := zone{}
				for _, part := range []zone{abroad, tt.zone} {
					maps.Copy(z, part)
				}
				f := &fakeForwarder{answer: z.answer(t)}
				r := newTestResolver(t, f, withSearch(t))
				defer end(t, r)
				asked := tt.asked
				if asked == "" {
					asked = pod
				}
				for round := range 3 {
					if a, _ := lookupBoth(t, r, "10.0.0.1", asked); a != tt.want {
						t.Errorf("round %d: got  %s\nwant %s", round, a, tt.want)
					}
				}
				if n := f.count("web.shop.svc.cluster.local. A") + f.count("web.shop.svc.cluster.local. AAAA"); n > 2 {
					t.Errorf("the Service was asked %d times", n)
				}
				if !tt.steps {
					return
				}
				for name, want := range map[string]string{
					"web-3.web.svc.cluster.local.": "NXDOMAIN", "web-3.web.cluster.local.": "NXDOMAIN",
					"web-3.web.node.example.": "NOERROR | web-3.web.node.example. A 192.0.2.1",
				} {
					if a, _ := lookupBoth(t, r, "10.0.0.1", name); a != want {
						t.Errorf("%s: %s, want %s", name, a, want)
					}
				}
			})
		})
	}
}

// TestServiceIsAskedOnce: what it costs to know that there is no such Service is
// one question for all names that could be its pods, and no time.
func TestServiceIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeForwarder{answer: zone{"example.com.": "A AAAA", "example.org.": "A", "www.com.": "A"}.answer(t)}
		r := newTestResolver(t, f, withSearch(t))
		defer end(t, r)
		for _, name := range []string{"example.com", "www.com", "example.org", "nowhere.com"} {
			lookupBoth(t, r, "10.0.0.1", name+".shop.svc.cluster.local.")
		}
		for service, want := range map[string]int{"com": 1, "org": 1} {
			name := service + ".shop.svc.cluster.local."
			if n := f.count(name+" A") + f.count(name+" AAAA"); n != want {
				t.Errorf("%s: asked %d times, want %d", name, n, want)
			}
		}
	})
}
