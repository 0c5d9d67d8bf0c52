package main

import (
	"strings"
	"testing"

	"github.com/dnsguard/dnsguard/resolver"
)

// TestExplanationText: whose list it is, and who walks it, in words.
func TestExplanationText(t *testing.T) {
	list := []string{"shop.svc.cluster.local."}
	for name, tt := range map[string]struct {
		x    resolver.Explanation
		want []string
	}{
		"a pod":             {resolver.Explanation{Source: "pod", Client: "10.0.0.1", List: list, NDots: 5}, []string{"search list: shop.svc.cluster.local. (ndots 5), of the pod 10.0.0.1", "the client walks by itself"}},
		"a finished walk":   {resolver.Explanation{Source: "namespace", List: list, Walked: true}, []string{"of a ClusterFirst pod of the namespace", "its walk is finished in this one step"}},
		"the host":          {resolver.Explanation{Source: "pod", Client: "10.0.0.1"}, []string{"search list: the pod 10.0.0.1 has none of its own", "no walk is made"}},
		"nobody":            {resolver.Explanation{Source: "none"}, []string{"search list: none is known", "no walk is made"}},
		"a note, an error":  {resolver.Explanation{Source: "none", Notes: []string{"so and so"}, Error: "22 why"}, []string{"note: so and so", "extended error 22 why"}},
		"read off the name": {resolver.Explanation{Source: "inferred", List: list}, []string{"read off the name"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			writeExplanation(&out, &tt.x, "this command")
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("does not say %q:\n%s", want, out.String())
				}
			}
		})
	}
}
