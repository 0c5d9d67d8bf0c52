package iptables

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeProtocol marks routes and routing rules as ours, so that they are known
// again whatever table and mark were configured then. It is in no list of
// include/uapi/linux/rtnetlink.h or iproute2's rt_protos. On rules: Linux 4.17.
const routeProtocol = 153

// routing delivers packets with our mark to this node, although no interface
// has their addresses: one routing rule a family, and a local route for each
// address. Host routes, since with "local default" and src_valid_mark (or an
// rpfilter with --validmark) the pods' addresses would pass for our own.
type routing struct {
	priority int
	mark     uint32
	table    int
	addrs    []netip.Addr
}

func (rs RuleSet) routing() routing {
	r := routing{priority: rs.cfg.RulePriority, mark: rs.cfg.taken(), table: rs.cfg.Table}
	for _, a := range rs.cfg.Addresses {
		if !slices.Contains(r.addrs, a.Addr()) {
			r.addrs = append(r.addrs, a.Addr())
		}
	}
	slices.SortFunc(r.addrs, netip.Addr.Compare)
	return r
}

// String shows the commands that would do the same, as comments.
func (r routing) String() string {
	var b strings.Builder
	for _, fam := range r.families() {
		fmt.Fprintf(&b, "# ip -%d rule add priority %d fwmark %#x/%#x lookup %d protocol %d\n",
			[2]int{4, 6}[fam], r.priority, r.mark, r.mark, r.table, routeProtocol)
	}
	for _, a := range r.addrs {
		fmt.Fprintf(&b, "# ip -%d route add local %v dev lo table %d proto %d\n",
			[2]int{4, 6}[family(a)], hostNet(a), r.table, routeProtocol)
	}
	return b.String()
}

func (r routing) families() []int {
	var out []int
	for _, a := range r.addrs {
		out = append(out, family(a))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// netlinkFamily is netlink's number of a family.
func netlinkFamily(fam int) int { return [2]int{netlink.FAMILY_V4, netlink.FAMILY_V6}[fam] }

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// check finds settings that clash with what is in the kernel already.
func (r routing) check(ownMark uint32) error {
	for _, fam := range r.families() {
		rules, err := steady(func() ([]netlink.Rule, error) { return netlink.RuleList(netlinkFamily(fam)) })
		if err != nil {
			return fmt.Errorf("list routing rules: %w", err)
		}
		for _, rule := range rules {
			if rule.Protocol == routeProtocol {
				continue
			}
			if bits := rule.Mark & mask(rule) & (r.mark | ownMark); bits != 0 {
				return &ConfigError{
					Key: "intercept.mark", Problem: fmt.Sprintf("the routing rule %q uses the bit %#x", ruleText(rule), bits),
					Remedy: "give two bits that nothing else on the node uses (ip rule shows those of routing rules)",
				}
			}
			if rule.Table == r.table {
				return &ConfigError{
					Key: "intercept.table", Problem: fmt.Sprintf("the routing rule %q uses the table %d", ruleText(rule), r.table),
					Remedy: "give the number of a table that is empty",
				}
			}
		}
		routes, err := r.list(fam)
		if err != nil {
			return err
		}
		for _, route := range routes {
			if route.Protocol != routeProtocol {
				return &ConfigError{
					Key: "intercept.table", Problem: fmt.Sprintf("the table %d holds a route to %v that is not ours", r.table, route.Dst),
					Remedy: fmt.Sprintf("give the number of a table that is empty (ip -%d route show table %d)", [2]int{4, 6}[fam], r.table),
				}
			}
		}
	}
	return nil
}

// list returns the routes in the table. The kernel sends those of every table:
// not for regular use.
func (r routing) list(fam int) ([]netlink.Route, error) {
	routes, err := steady(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlinkFamily(fam), &netlink.Route{Table: r.table}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes of table %d: %w", r.table, err)
	}
	return routes, nil
}

// strangers are rules of others that sort before ours, and routes of others that
// were in the place of ours.
type strangers struct{ rules, routes []string }

// ensure adds what is missing. The kernel refuses a second one of either kind,
// so nothing is ever there twice. What cannot be had for one address, or one
// family, keeps nothing from the others.
func (r routing) ensure() (added int, foreign strangers, err error) {
	var errs []error
	for _, fam := range r.families() {
		one, before, err := r.ensureRule(fam)
		added += one
		foreign.rules = append(foreign.rules, before...)
		errs = append(errs, err)
	}
	for _, a := range r.addrs {
		one, removed, err := r.ensureRoute(a, len(foreign.rules) > 0)
		added += one
		foreign.routes = append(foreign.routes, removed...)
		errs = append(errs, err)
	}
	return added, foreign, errors.Join(errs...)
}

// ensureRule adds the routing rule of a family, and returns the foreign ones before
// it.
func (r routing) ensureRule(fam int) (added int, foreign []string, err error) {
	rules, err := steady(func() ([]netlink.Rule, error) { return netlink.RuleList(netlinkFamily(fam)) })
	if err != nil {
		return 0, nil, fmt.Errorf("list routing rules: %w", err)
	}
	foreign, there := r.before(rules)
	if there {
		return 0, foreign, nil
	}
	switch err := netlink.RuleAdd(r.rule(fam)); {
	case err == nil:
		return 1, foreign, nil
	case !errors.Is(err, unix.EEXIST):
		return 0, foreign, fmt.Errorf("add routing rule: %w", err)
	}
	return 0, foreign, nil
}

// ensureRoute adds the route to an address, and removes and returns those of others
// in its place. Behind a foreign rule another route may be found first.
func (r routing) ensureRoute(a netip.Addr, foreignRule bool) (added int, removed []string, err error) {
	if added, err = r.add(a); err != nil {
		return added, nil, err
	}
	if here, away := r.leads(a); here || away && foreignRule {
		return added, nil, nil
	}
	removed, err = r.clear(a)
	if err == nil && len(removed) > 0 {
		var one int
		one, err = r.add(a)
		added += max(one, 1) // ours may have been there, behind it
	}
	return added, removed, err
}

// add adds the route to an address, if there is none in its place.
func (r routing) add(a netip.Addr) (added int, err error) {
	switch err := netlink.RouteAdd(r.route(a)); {
	case err == nil:
		return 1, nil
	case errors.Is(err, unix.EACCES) && a.Is6(): // ip6_route_info_create in net/ipv6/route.c
		return 0, &ConfigError{
			Key: "listen", Problem: fmt.Sprintf("%v cannot be intercepted while IPv6 is disabled on the loopback device", a), Err: err,
			Remedy: "set the sysctl net.ipv6.conf.lo.disable_ipv6 to 0, or intercept no IPv6 address on this node",
		}
	case !errors.Is(err, unix.EEXIST):
		return 0, fmt.Errorf("add local route for %v to table %d: %w", a, r.table, err)
	}
	return 0, nil
}

// leads reports whether what is marked finds our route to an address, and whether it
// finds one in another table. The kernel takes any route to it for a second one, also
// one that replaced ours (blackhole, throw); a look-up tells them apart, for much
// less than a list of the table costs (list).
func (r routing) leads(a netip.Addr) (here, away bool) {
	found, err := netlink.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{Mark: r.mark, FIBMatch: true})
	if err != nil || len(found) != 1 {
		return false, false
	}
	f := found[0]
	return f.Table == r.table && f.Type == unix.RTN_LOCAL && f.Protocol == routeProtocol, f.Table != r.table
}

// clear removes the routes of others to an address from our table, which was empty
// at the start, and returns them as text.
func (r routing) clear(a netip.Addr) (removed []string, err error) {
	routes, err := r.list(family(a))
	if err != nil {
		return nil, err
	}
	for _, route := range routes {
		if route.Protocol == routeProtocol || route.Dst == nil || route.Dst.String() != hostNet(a).String() {
			continue
		}
		if err := netlink.RouteDel(&route); err != nil && !errors.Is(err, unix.ESRCH) {
			return removed, fmt.Errorf("delete the route of somebody else to %v from table %d: %w", a, r.table, err)
		}
		removed = append(removed, routeText(route))
	}
	return removed, nil
}

// routeText shows a route as "ip route" does, as far as we tell routes apart.
func routeText(r netlink.Route) string {
	kind, known := map[int]string{
		unix.RTN_UNICAST: "unicast", unix.RTN_LOCAL: "local", unix.RTN_BLACKHOLE: "blackhole",
		unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw",
	}[r.Type]
	if !known {
		kind = fmt.Sprintf("type %d", r.Type)
	}
	return fmt.Sprintf("%s %v table %d proto %d metric %d", kind, r.Dst, r.Table, int(r.Protocol), r.Priority)
}

// steady lists again when somebody changed the list meanwhile, which the kernel
// tells. If that never ends the last list is as good as any: what is added
// twice is refused, and what is overlooked is seen the next time.
func steady[T any](list func() (T, error)) (T, error) {
	const tries = 5
	var out T
	for range tries {
		var err error
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, nil
}

// before returns the foreign rules that sort before ours, and whether ours is
// there. rules are in the kernel's order.
func (r routing) before(rules []netlink.Rule) (foreign []string, there bool) {
	for _, rule := range rules {
		if rule.Protocol == routeProtocol && rule.Priority == r.priority && rule.Mark == r.mark &&
			mask(rule) == r.mark && rule.Table == r.table {
			return foreign, true
		}
		// The kernel's own first rule finds only addresses that are on
		// interfaces; ours are on none.
		if rule.Priority <= r.priority && rule.Protocol != routeProtocol && rule.Table != unix.RT_TABLE_LOCAL {
			foreign = append(foreign, ruleText(rule))
		}
	}
	return foreign, false
}

func (r routing) rule(fam int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table, rule.Protocol = netlinkFamily(fam), r.priority, r.table, routeProtocol
	rule.Mark, rule.Mask = r.mark, &r.mark
	return rule
}

// loopbackIndex is the loopback device's in every network namespace.
const loopbackIndex = 1

func (r routing) route(a netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst: hostNet(a), Table: r.table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		LinkIndex: loopbackIndex, Protocol: routeProtocol,
	}
}

// prune removes rules and routes of ours, or of a predecessor, that are not
// wanted; with a zero routing all of them.
func (r routing) prune() (removed int, err error) {
	for fam := range 2 {
		rules, err := steady(func() ([]netlink.Rule, error) { return netlink.RuleList(netlinkFamily(fam)) })
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return removed, fmt.Errorf("list routing rules: %w", err)
		}
		for _, rule := range rules {
			wanted := rule.Priority == r.priority && rule.Mark == r.mark && rule.Table == r.table && slices.Contains(r.families(), fam)
			if rule.Protocol != routeProtocol || wanted {
				continue
			}
			rule.Family = netlinkFamily(fam)
			if err := netlink.RuleDel(&rule); err != nil && !errors.Is(err, unix.ENOENT) {
				return removed, fmt.Errorf("delete routing rule %q: %w", ruleText(rule), err)
			}
			removed++
		}
		routes, err := steady(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(netlinkFamily(fam),
				&netlink.Route{Table: unix.RT_TABLE_UNSPEC, Protocol: routeProtocol}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return removed, fmt.Errorf("list routes: %w", err)
		}
		for _, route := range routes {
			if route.Protocol != routeProtocol || route.Table == r.table && r.wants(route.Dst) {
				continue
			}
			if err := netlink.RouteDel(&route); err != nil && !errors.Is(err, unix.ESRCH) {
				return removed, fmt.Errorf("delete route to %v: %w", route.Dst, err)
			}
			removed++
		}
	}
	return removed, nil
}

func (r routing) wants(dst *net.IPNet) bool {
	return slices.ContainsFunc(r.addrs, func(a netip.Addr) bool { return dst != nil && hostNet(a).String() == dst.String() })
}

// mask is the part of the mark that a rule looks at.
func mask(rule netlink.Rule) uint32 {
	switch {
	case rule.Mask != nil:
		return *rule.Mask
	case rule.Mark != 0:
		return ^uint32(0)
	}
	return 0
}

// ruleText shows a rule as "ip rule" does, as far as we tell rules apart.
func ruleText(r netlink.Rule) string {
	text := fmt.Sprintf("%d: from ", r.Priority)
	if r.Src != nil {
		text += r.Src.String()
	} else {
		text += "all"
	}
	if r.Dst != nil {
		text += " to " + r.Dst.String()
	}
	if m := mask(r); m != 0 {
		text += fmt.Sprintf(" fwmark %#x/%#x", r.Mark, m)
	}
	if r.IifName != "" {
		text += " iif " + r.IifName
	}
	if r.OifName != "" {
		text += " oif " + r.OifName
	}
	return text + fmt.Sprintf(" lookup %d", r.Table)
}
