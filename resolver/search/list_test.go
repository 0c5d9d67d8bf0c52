package search

import (
	"fmt"
	"strings"
	"testing"
)

// lettered returns a domain of n characters.
func lettered(n int, first string) string {
	var b strings.Builder
	b.WriteString(first)
	for b.Len() < n {
		if b.Len()%50 == 49 && b.Len() < n-1 {
			b.WriteByte('.')
			continue
		}
		b.WriteByte('x')
	}
	return b.String()
}

// TestListAsWritten: lists that nobody wants are those that kubelet writes
// (v1.37, pkg/kubelet/network/dns) and libcs read (glibc 2.36, musl 1.2.3). Where
// libcs differ there is no list, and no walk.
func TestListAsWritten(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{"node.example."}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	const usual = "shop.svc.cluster.local svc.cluster.local cluster.local node.example"
	var forty []string
	for i := range 40 {
		forty = append(forty, fmt.Sprintf("d%02d.example", i))
	}
	var full []string
	for i := range 8 {
		full = append(full, lettered(253, string(rune('a'+i))))
	}
	most := func(last int) []string { // 7*253 + 7 spaces + the rest in two
		return append(append([]string(nil), full[:7]...), lettered(100, "y"), lettered(last, "z"))
	}
	over := 2048 - 7*253 - 8 - 100
	number := func(n int) *int { return &n }
	tests := map[string]struct {
		pod     Pod
		domains string // empty: no list
		ndots   int
	}{
		"40 of its own, after the usual": {Pod{Searches: forty}, usual + " " + strings.Join(forty[:28], " "), 5},
		"40 of its own alone":            {Pod{DNSPolicy: None, Searches: forty}, strings.Join(forty[:32], " "), 1},
		"2,048 characters":               {Pod{DNSPolicy: None, Searches: most(over)}, strings.Join(most(over), " "), 1},
		"one more": {
			Pod{DNSPolicy: None, Searches: most(over + 1)}, strings.Join(most(over + 1)[:8], " "), 1,
		},
		"one more by a final dot": {
			Pod{DNSPolicy: None, Searches: append(most(over)[:8], lettered(over, "z")+".")}, strings.Join(most(over)[:8], " "), 1,
		},
		"much more":                             {Pod{DNSPolicy: None, Searches: append(append([]string(nil), full...), forty...)}, strings.Join(full, " ") + " d00.example", 1},
		"253 characters":                        {Pod{DNSPolicy: None, Searches: []string{lettered(253, "a"), "b.example"}}, lettered(253, "a") + " b.example", 1},
		"254, one of them a final dot: omitted": {Pod{DNSPolicy: None, Searches: []string{lettered(253, "a") + ".", "b.example"}}, "b.example", 1},
		"300: omitted, too":                     {Pod{DNSPolicy: None, Searches: []string{"b.example", lettered(300, "a")}}, "b.example", 1},
		"nothing but one too long":              {Pod{DNSPolicy: None, Searches: []string{lettered(300, "a")}}, "", 0},
		"duplicates":                            {Pod{Searches: []string{"a.example", "svc.cluster.local", "a.example", "node.example"}}, usual + " a.example", 5},
		"duplicates but for case and dots":      {Pod{Searches: []string{"A.Example", "a.example.", "a.example", "Cluster.LOCAL."}}, usual + " a.example", 5},
		"which count for kubelet, all the same": {Pod{DNSPolicy: None, Searches: append(forty[:31:31], "D00.example", "last.example")}, strings.Join(forty[:31], " "), 1},
		"an empty one":                          {Pod{DNSPolicy: None, Searches: []string{"a.example", "", "b.example"}}, "a.example b.example", 1},
		"nothing but an empty one":              {Pod{DNSPolicy: None, Searches: []string{""}}, "", 0},
		"the root last":                         {Pod{DNSPolicy: None, Searches: []string{"a.example", "."}}, "a.example", 1},
		"the root after the usual":              {Pod{Searches: []string{"."}}, usual, 5},
		"the root alone":                        {Pod{DNSPolicy: None, Searches: []string{"."}}, "", 0},
		"the root before others":                {Pod{DNSPolicy: None, Searches: []string{".", "a.example"}}, "", 0},
		"no name":                               {Pod{Searches: []string{"a..example"}}, "", 0},
		"a label of 64":                         {Pod{Searches: []string{strings.Repeat("x", 64) + ".example"}}, "", 0},
		"ndots 0":                               {Pod{NDots: number(0)}, usual, 0},
		"ndots 15":                              {Pod{NDots: number(15)}, usual, 15},
		"ndots 16":                              {Pod{NDots: number(16)}, usual, 15},
		"ndots 2,000,000,000":                   {Pod{NDots: number(2_000_000_000)}, usual, 15},
		"ndots -1: 15 to glibc, 1 to musl":      {Pod{NDots: number(-1)}, "", 0},
		"a policy that is none":                 {Pod{DNSPolicy: "Sometimes"}, "", 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tt.pod.Namespace = "shop"
			before := strings.Join(tt.pod.Searches, " ")
			l := p.ListOf(tt.pod)
			if after := strings.Join(tt.pod.Searches, " "); after != before {
				t.Fatalf("the pod's searches are now %q", after)
			}
			if tt.domains == "" {
				if l != nil {
					t.Fatalf("got %v, ndots %d, want none", shown(l), l.NDots)
				}
				return
			}
			if l == nil {
				t.Fatal("no list")
			}
			if got := shown(l); got != tt.domains || l.NDots != tt.ndots {
				t.Errorf("got  %s, ndots %d\nwant %s, %d", got, l.NDots, tt.domains, tt.ndots)
			}
			if len(tt.domains) > maxListChars || len(l.Domains) > maxDomains {
				t.Error("beyond the limits")
			}
		})
	}
}

func shown(l *List) string {
	var domains []string
	for _, d := range l.Domains {
		domains = append(domains, presentation(d))
	}
	return strings.Join(domains, " ")
}

// TestNewRefuses: the node's domains are the operator's, and are to be right.
func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]Config{
		"ndots 16":         {ClusterDomain: "cluster.local", NDots: 16},
		"ndots -1":         {ClusterDomain: "cluster.local", NDots: -1},
		"an empty domain":  {ClusterDomain: "cluster.local", Domains: []string{""}},
		"the root":         {ClusterDomain: "cluster.local", Domains: []string{"."}},
		"no name":          {ClusterDomain: "cluster.local", Domains: []string{"a..b"}},
		"a cluster domain": {ClusterDomain: "a..b"},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestInferKeepsTheLimits: the list of an unknown client is cut as kubelet cuts a
// known one's.
func TestInferKeepsTheLimits(t *testing.T) {
	var forty []string
	for i := range 40 {
		forty = append(forty, fmt.Sprintf("D%02d.example.", i))
	}
	p, err := New(Config{ClusterDomain: "Cluster.Local.", Domains: forty, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	qname, err := wireName("a.b.shop.svc.cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	inferred, known := p.Infer(qname), p.ListOf(Pod{Namespace: "shop"})
	if len(inferred.Domains) != 32 || shown(inferred) != shown(known) || inferred.ID() != known.ID() {
		t.Errorf("got  %s\nwant %s", shown(inferred), shown(known))
	}
}

// TestIdentity: lists have the same identity if and only if clients with them
// walk alike, wherever they come from. Walks' answers are kept by it.
func TestIdentity(t *testing.T) {
	p, err := New(Config{ClusterDomain: "cluster.local", Domains: []string{"node.example"}, NDots: 5})
	if err != nil {
		t.Fatal(err)
	}
	number := func(n int) *int { return &n }
	const first = "shop.svc.cluster.local"
	different := []Pod{
		{Namespace: "shop"},
		{Namespace: "other"},
		{Namespace: "shop", NDots: number(4)},
		{Namespace: "shop", Expand: true},
		{Namespace: "shop", Searches: []string{"a.example"}},
		{Namespace: "shop", Searches: []string{"a.example", "b.example"}},
		{Namespace: "shop", Searches: []string{"b.example", "a.example"}},
		{Namespace: "shop", Searches: []string{"b.example.a.example"}},
		{DNSPolicy: None, Searches: []string{first}, NDots: number(5)},
		{DNSPolicy: None, Searches: []string{first, "example"}, NDots: number(5)},
		{DNSPolicy: None, Searches: []string{first}},
	}
	seen := map[ID]int{}
	for i, pod := range different {
		id := p.ListOf(pod).ID()
		if j, ok := seen[id]; ok {
			t.Errorf("%v and %v have one identity", different[j], pod)
		}
		seen[id] = i
	}
	for i, pod := range []Pod{
		{Namespace: "shop", DNSPolicy: ClusterFirst, NDots: number(5), Searches: []string{"Node.Example."}},
		{Namespace: "any", DNSPolicy: None, Searches: []string{first, "svc.cluster.local", "cluster.local", "node.example"}, NDots: number(5)},
	} {
		if p.ListOf(pod).ID() != p.ListOf(different[0]).ID() {
			t.Errorf("%d: another identity for the same list", i)
		}
	}
}
