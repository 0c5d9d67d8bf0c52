package iptables

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Priorities of our base chains, relative to include/uapi/linux/netfilter_ipv4.h.
const (
	// before conntrack looks (-200) and after fragments are put together (-400)
	priorityRaw = -300
	// the fallback sees what the process's table has not marked
	priorityFallback = priorityRaw + 1
	// after the reply of a translated flow has its source back (100)
	priorityUnfallback = 110
)

const (
	// takenTimeout is how long a client's count lasts, whether it asks or not:
	// looking it up does not renew it.
	takenTimeout = 5 * time.Minute
	// maxClients bounds the memory that clients with forged addresses cost.
	maxClients = 65536
	// renewOneIn: of answers that leave the node, one in so many on average
	// renews @alive: it costs three times what the others do, and all CPUs
	// would write the same few elements. Where that is too rare, below some 200
	// answers a second, a probe renews them: answers over loopback all do.
	renewOneIn = 64
)

// RuleSet is everything that the kernel is told, as data.
type RuleSet struct {
	cfg      Config
	slot     int
	services []Service
	armed    []Service // services that are not withdrawn
	exclude  []netip.Prefix
	// bypassing: some client is let past.
	bypassing bool
	// lookupCounts: to look an element up counts it, Linux 5.7.
	lookupCounts bool
}

// NewRuleSet returns what an Interceptor with this Config tells the kernel.
func NewRuleSet(cfg Config) (RuleSet, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return RuleSet{}, err
	}
	rs := newRuleSet(cfg, 0, nil)
	rs.bypassing, rs.lookupCounts = true, true // show all that there can be
	return rs, nil
}

// newRuleSet builds the rule set of the process in a slot, with some services
// withdrawn. cfg is valid.
func newRuleSet(cfg Config, slot int, withdrawn map[Service]string) RuleSet {
	rs := RuleSet{cfg: cfg, slot: slot, services: cfg.services(), exclude: disjoint(cfg.Exclude)}
	rs.armed = slices.DeleteFunc(slices.Clone(rs.services), func(s Service) bool { return has(withdrawn, s) })
	return rs
}

// Text shows the rule set as the backend's own program would read it, with the
// routing as comments. Auto shows nftables.
func (rs RuleSet) Text(b Backend) string {
	var out strings.Builder
	out.WriteString(rs.routing().String())
	if b == IPTables {
		for fam := range 2 {
			if rs.covers(fam) {
				fmt.Fprintf(&out, "\n# %s --noflush -w\n%s", restoreProgram(fam), rs.restoreText(fam))
			}
		}
		return out.String()
	}
	t := rs.process(true)
	fmt.Fprintf(&out, "\n%s", t.String())
	if f, ok := rs.fallback(); ok {
		fmt.Fprintf(&out, "\n%s", f.String())
	}
	return out.String()
}

// covers reports whether an address of the family is intercepted.
func (rs RuleSet) covers(fam int) bool {
	return slices.ContainsFunc(rs.cfg.Addresses, func(a netip.AddrPort) bool { return family(a.Addr()) == fam })
}

// ports returns the ports of all addresses, once each.
func (rs RuleSet) ports() []uint16 {
	var out []uint16
	for _, a := range rs.cfg.Addresses {
		out = append(out, a.Port())
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// ofFamily returns the services of one family.
func ofFamily(services []Service, fam int) []Service {
	return slices.DeleteFunc(slices.Clone(services), func(s Service) bool { return family(s.Addr.Addr()) != fam })
}

// tableName is the process's table. A process takes the slot after the newest
// living one, so names differ while two overlap.
func tableName(slot int) string {
	if slot == 0 {
		return "dnsguard"
	}
	return fmt.Sprintf("dnsguard-%d", slot)
}

// Names of sets, to which the family's digit is added: 4 or 6.
const (
	setLocal   = "local"   // the services
	setArmed   = "armed"   // those that are not withdrawn
	setAlive   = "alive"   // those from which an answer has left lately
	setTaken   = "taken"   // clients, with what was taken from them
	setBypass  = "bypass"  // clients that cannot reach us
	setExclude = "exclude" // clients that are not to
)

// setName is the name of a family's set.
func setName(base string, fam int) string { return base + [2]string{"4", "6"}[fam] }

// process is the table that takes packets. Every packet of the node meets its
// base chains, and every query and answer the rest; a statement costs some
// nanoseconds, a look into a set or for a socket fifty, a chain that is called
// twenty (BenchmarkStatements, BenchmarkRules). So what is not DNS is let go at
// once, the common case has no other chain, clients are looked up for nothing
// but to be counted while none is excluded or bypassed, and what renews @alive is
// a sample.
func (rs RuleSet) process(owner bool) table {
	t := table{name: tableName(rs.slot), owner: owner}
	marks, taken, own := rs.cfg.Mark, rs.cfg.taken(), rs.cfg.own()
	prerouting := chain{name: "prerouting", hook: &hook{"filter", unix.NF_INET_PRE_ROUTING, "prerouting", priorityRaw}}
	output := chain{name: "output", hook: &hook{"route", unix.NF_INET_LOCAL_OUT, "output", priorityRaw}}
	// To let go by both ports in one rule would be cheaper for what is neither
	// query nor answer, but nft 1.0.6 makes one comparison of two fields that are
	// next to each other, which for "not equal" means something else.
	var notQuery rule
	for _, p := range rs.ports() {
		notQuery = append(notQuery, isPort{field: dport, port: p, not: true})
	}
	notQuery = append(notQuery, done())
	prerouting.rules = []rule{notQuery}
	for _, a := range rs.popular() {
		answer := rule{isPort{field: sport, port: a.Port()}, isAddr{saddr, a.Addr()}}
		output.rules = append(
			output.rules,
			append(slices.Clone(answer), unlucky{renewOneIn}, leavesNode{}, notrack{}, done()),
			append(answer, goTo(setName("reply", family(a.Addr())))),
		)
	}
	output.rules = append(output.rules,
		notQuery,
		rule{isMark{own, own}, done()}) // ours to upstream: to kube-proxy
	for fam := range 2 {
		if !rs.covers(fam) {
			continue
		}
		t.sets = append(t.sets, rs.sets(fam)...)
		name := func(base string) string { return setName(base, fam) }
		to, from := []field{daddr, l4proto, dport}, []field{saddr, l4proto, sport}
		client := []field{saddr, l4proto}
		seize := func(when ...statement) rule { return append(when, notrack{}, setMark{taken}, done()) }

		alive, take := inSet{fam, to, name(setAlive)}, goTo(name("take"))
		t.chains = append(
			t.chains,
			chain{name: name("take"), rules: []rule{
				seize(isTCP{mask: flagSYN | flagACK, flags: flagSYN, not: true}), // of a connection, the attempt counts
				// A rule of its own: a full set ends the rule, not the chain.
				{updateSet{fam: fam, fields: client, set: name(setTaken), count: true}},
				seize(),
			}},
			chain{name: name("reply"), rules: []rule{
				{notrack{}},
				// A hung process's kernel still shakes hands and resets: only
				// segments with data that was pushed show life.
				{isTCP{mask: flagSYN | flagRST | flagPSH, flags: flagPSH, not: true}, done()},
				{inSet{fam, from, name(setArmed)}, updateSet{fam: fam, fields: from, set: name(setAlive), timeout: rs.cfg.AliveTimeout}},
			}},
		)

		// The common case: a datagram of a client that is counted already, which
		// looking it up does.
		known := func(when ...statement) []rule {
			if !rs.lookupCounts {
				return nil
			}
			return []rule{seize(slices.Concat(rule{isProto{UDP}}, when, rule{hasSocket{}, inSet{fam, client, name(setTaken)}})...)}
		}
		query, local := append(known(alive), rule{alive, hasSocket{}, take}), rule{alive, take}
		if let := rs.let(fam); len(let) > 0 {
			t.chains = append(
				t.chains,
				chain{name: name("query"), rules: slices.Concat(let, known(), []rule{{hasSocket{}, take}})},
				chain{name: name("host"), rules: append(let, rule{take})},
			)
			query, local = []rule{{alive, goTo(name("query"))}}, rule{alive, goTo(name("host"))}
		}
		// What the output hook has taken comes by here as well: to take it twice
		// changes nothing.
		prerouting.rules = append(prerouting.rules, query...)
		output.rules = append(
			output.rules,
			// A probe, or taken by another process's table.
			rule{isMark{marks, taken}, inSet{fam, to, name(setLocal)}, notrack{}, done()},
			local, // a socket match would find the client's own socket
		)
	}
	// Chains that are called come first: the kernel wants to know them.
	t.chains = append(t.chains, prerouting, output)
	return t
}

// popular returns the addresses, first those that pods ask unless told
// otherwise.
func (rs RuleSet) popular() []netip.AddrPort {
	isClusterIP := func(a netip.AddrPort) bool { return slices.Contains(rs.cfg.ClusterIPs, a.Addr()) }
	others := slices.DeleteFunc(slices.Clone(rs.cfg.Addresses), isClusterIP)
	first := slices.DeleteFunc(slices.Clone(rs.cfg.Addresses), func(a netip.AddrPort) bool { return !isClusterIP(a) })
	return append(first, others...)
}

// let are the rules that let clients' packets pass.
func (rs RuleSet) let(fam int) []rule {
	var out []rule
	client := []field{saddr, l4proto}
	if rs.bypassing {
		out = append(out, rule{inSet{fam, client, setName(setBypass, fam)}, back()})
	}
	if slices.ContainsFunc(rs.exclude, func(p netip.Prefix) bool { return family(p.Addr()) == fam }) {
		out = append(out, rule{inSet{fam, client[:1], setName(setExclude, fam)}, back()})
	}
	return out
}

// sets are the sets of one family.
func (rs RuleSet) sets(fam int) []set {
	service := []keyPart{keyAddr, keyProto, keyPort}
	client := service[:2]
	name := func(base string) string { return setName(base, fam) }
	return []set{
		{name: name(setLocal), fam: fam, key: service, services: ofFamily(rs.services, fam)},
		{name: name(setArmed), fam: fam, key: service, services: ofFamily(rs.armed, fam)},
		{name: name(setAlive), fam: fam, key: service, dynamic: true, timed: true, size: 1024},
		{name: name(setTaken), fam: fam, key: client, dynamic: true, timed: true, timeout: takenTimeout, size: maxClients},
		{name: name(setBypass), fam: fam, key: client, timed: true, size: maxClients},
		{
			name: name(setExclude), fam: fam, key: client[:1], interval: true,
			prefixes: slices.DeleteFunc(slices.Clone(rs.exclude), func(p netip.Prefix) bool { return family(p.Addr()) != fam }),
		},
	}
}

// fallbackName is the table that outlives the process.
const fallbackName = "dnsguard-fallback"

// fallback is the table that sends what goes to a link-local address, and was
// not taken, to the ClusterIP, where kube-proxy translates it as it does
// everything else; and gives the answers the link-local source back. It keeps
// no list of endpoints that could grow stale. The zone keeps such a flow apart
// from one that the same client port has to the ClusterIP itself.
//
// ok is false if there is nothing to fall back from, or to.
func (rs RuleSet) fallback() (t table, ok bool) {
	t.name = fallbackName
	forth, backward := chain{name: "rewrite"}, chain{name: "restore"}
	for _, a := range rs.cfg.Addresses {
		vip, has := rs.clusterIP(a.Addr())
		if !has || a.Port() != dnsPort || vip == a.Addr() {
			continue
		}
		for _, p := range protos() {
			forth.rules = append(forth.rules, rule{isAddr{daddr, a.Addr()}, isProto{p}, setZone{rs.cfg.Zone}, setAddr{daddr, vip}, done()})
		}
		backward.rules = append(backward.rules, rule{isAddr{saddr, vip}, setAddr{saddr, a.Addr()}})
	}
	toRewrite := []rule{{isPort{field: dport, port: dnsPort}, isMark{rs.cfg.taken(), 0}, jump("rewrite")}}
	// The port costs less than the flow, and lets most packets go.
	toRestore := []rule{{isPort{field: sport, port: dnsPort}, isReplyInZone{rs.cfg.Zone}, jump("restore")}}
	t.chains = []chain{
		forth, backward,
		{name: "prerouting", hook: &hook{"filter", unix.NF_INET_PRE_ROUTING, "prerouting", priorityFallback}, rules: toRewrite},
		{name: "output", hook: &hook{"route", unix.NF_INET_LOCAL_OUT, "output", priorityFallback}, rules: toRewrite},
		{name: "input", hook: &hook{"filter", unix.NF_INET_LOCAL_IN, "input", priorityUnfallback}, rules: toRestore},
		{name: "postrouting", hook: &hook{"filter", unix.NF_INET_POST_ROUTING, "postrouting", priorityUnfallback}, rules: toRestore},
	}
	return t, len(forth.rules) > 0
}

// dnsPort is the port on which kube-dns serves, whatever it is called inside.
const dnsPort = 53

// clusterIP returns kube-dns's address of the family of a.
func (rs RuleSet) clusterIP(a netip.Addr) (netip.Addr, bool) {
	if slices.Contains(rs.cfg.ClusterIPs, a) {
		return a, true
	}
	i := slices.IndexFunc(rs.cfg.ClusterIPs, func(c netip.Addr) bool { return family(c) == family(a) })
	if i < 0 {
		return netip.Addr{}, false
	}
	return rs.cfg.ClusterIPs[i], true
}

// disjoint sorts prefixes and drops those that lie in another: the kernel
// refuses intervals that overlap.
func disjoint(prefixes []netip.Prefix) []netip.Prefix {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	var out []netip.Prefix
	for _, p := range sorted {
		if len(out) == 0 || !out[len(out)-1].Contains(p.Addr()) {
			out = append(out, p)
		}
	}
	return out
}
