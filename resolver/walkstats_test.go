package resolver

import (
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// counted is what is told of walks.
type counted struct {
	Collapse, Expand [NumWalkResults]uint64 // answered, nxdomain, error
	Saved            uint64
}

// TestWalkCounts: walks are counted by kind and result where they are made, and
// what they spare clients wherever a client is answered.
func TestWalkCounts(t *testing.T) {
	type ask struct {
		name      string
		client    string // "10.0.0.1" if empty
		transport Transport
		do        bool
	}
	const shop = ".shop.svc.cluster.local."
	z := zone{"a.b.c.": "A AAAA", "d.e.f.svc.cluster.local.": "A", "own.x.y" + shop: "A", "half.x.y.svc.cluster.local.": "nothing", "bad.x.y.svc.cluster.local.": "fails", "db" + shop: "A"}
	tests := map[string]struct {
		asks []ask
		want counted
	}{
		"the last of five":                {[]ask{{name: "a.b.c" + shop}}, counted{Collapse: [NumWalkResults]uint64{1, 0, 0}, Saved: 4}},
		"hits spare as much":              {[]ask{{name: "a.b.c" + shop}, {name: "a.b.c" + shop}, {name: "a.b.c" + shop, client: "10.0.0.3"}}, counted{Collapse: [NumWalkResults]uint64{1, 0, 0}, Saved: 12}},
		"the second":                      {[]ask{{name: "d.e.f" + shop}, {name: "d.e.f" + shop, transport: TCP}}, counted{Collapse: [NumWalkResults]uint64{1, 0, 0}, Saved: 2}},
		"the first spares nothing":        {[]ask{{name: "own.x.y" + shop}, {name: "own.x.y" + shop}}, counted{Collapse: [NumWalkResults]uint64{1, 0, 0}}},
		"nowhere":                         {[]ask{{name: "no.x.y" + shop}, {name: "no.x.y" + shop}}, counted{Collapse: [NumWalkResults]uint64{0, 1, 0}}},
		"left to the client":              {[]ask{{name: "half.x.y" + shop}}, counted{Collapse: [NumWalkResults]uint64{0, 1, 0}}},
		"an error":                        {[]ask{{name: "bad.x.y" + shop}}, counted{Collapse: [NumWalkResults]uint64{0, 0, 1}}},
		"expanded, which spares nobody":   {[]ask{{name: "db."}, {name: "db."}}, counted{Expand: [NumWalkResults]uint64{1, 0, 0}}},
		"expanded, nowhere":               {[]ask{{name: "none."}}, counted{Expand: [NumWalkResults]uint64{0, 1, 0}}},
		"no walks: absolute, and with DO": {[]ask{{name: "a.b.c.d.e.f."}, {name: "a.b.c" + shop, do: true}}, counted{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newTestResolver(t, &fakeForwarder{answer: z.answer(t)}, withSearch(t, expandShop))
				defer end(t, r)
				var saved uint64
				for _, a := range tt.asks {
					client := a.client
					if client == "" {
						client = "10.0.0.1"
					}
					c := newClient(t, r, client, a.transport)
					m := query(a.name, dns.TypeA)
					m.IsEdns0().SetDo(a.do)
					c.ask(m)
					<-c.answers
					saved += c.s.c.saved.Load() // of a reader
				}
				s := r.Stats()
				got := counted{Collapse: s.Walks[WalkCollapse], Expand: s.Walks[WalkExpand], Saved: s.Saved + saved}
				if d := cmp.Diff(tt.want, got); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
			})
		})
	}
}

// TestTooLargeSparesNothing: who is told to ask again over TCP, or to go on, has
// been spared nothing yet.
func TestTooLargeSparesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestResolver(t, &fakeForwarder{answer: sizedWorld(t, 60, 0)}, withSearch(t))
		defer end(t, r)
		for i, transport := range []Transport{UDP, TCP} {
			c := newClient(t, r, "10.0.9.9", transport)
			c.ask(new(dns.Msg).SetQuestion("www.a.uk.shop.svc.cluster.local.", dns.TypeA))
			<-c.answers
			if n := r.Stats().Saved + c.s.c.saved.Load(); n != uint64(4*i) {
				t.Errorf("%v: %d questions spared, want %d", transport, n, 4*i)
			}
		}
	})
}
