package iptables

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Programs of the iptables backend, of the variant (nft or legacy) that the
// node has chosen for its own.
func restoreProgram(fam int) string { return [2]string{"iptables-restore", "ip6tables-restore"}[fam] }
func saveProgram(fam int) string    { return [2]string{"iptables-save", "ip6tables-save"}[fam] }

// chainPrefix starts the name of every chain of ours, of any slot.
const chainPrefix = "DNSGUARD"

// xtChains are the chains of a slot, with the built-in one of table raw that
// jumps there.
type xtChains struct{ query, reply, take string }

func chainsOf(slot int) xtChains {
	prefix := chainPrefix
	switch {
	case slot == probeSlot:
		prefix += "-PROBE"
	case slot > 0:
		prefix = fmt.Sprintf("%s-%d", chainPrefix, slot)
	}
	return xtChains{query: prefix + "-QUERY", reply: prefix + "-REPLY", take: prefix + "-TAKE"}
}

// jumps are the rules that lead into our chains, as iptables-save shows them.
func (c xtChains) jumps() [2]string {
	return [2]string{"-A PREROUTING -j " + c.query, "-A OUTPUT -j " + c.reply}
}

// recentName is the list of xt_recent that plays the part of @alive: when an
// answer of the protocol last left from an address.
func recentName(slot, fam int, s Service) string {
	return fmt.Sprintf("dnsguard%d-%v%d-%d", slot, s.Proto, [2]int{4, 6}[fam], s.Addr.Port())
}

// aliveSeconds is the timeout in the whole seconds that xt_recent counts.
func (rs RuleSet) aliveSeconds() int {
	return int((rs.cfg.AliveTimeout + time.Second - 1) / time.Second)
}

// restoreText is what iptables-restore --noflush is fed for one family: our
// chains with their rules. The jumps to them come on top, where they are
// missing: see xtKernel.
func (rs RuleSet) restoreText(fam int) string {
	c := chainsOf(rs.slot)
	var b strings.Builder
	b.WriteString("*raw\n")
	for _, name := range []string{c.query, c.reply, c.take} {
		fmt.Fprintf(&b, ":%s - [0:0]\n", name) // creates the chain, or empties it
	}
	mark := func(value, mask uint32) string { return fmt.Sprintf("-m mark --mark %#x/%#x", value, mask) }
	rule := func(chain, format string, args ...any) {
		fmt.Fprintf(&b, "-A %s "+format+"\n", append([]any{chain}, args...)...)
	}

	rule(c.take, "-j MARK --set-xmark %#x/%#x", rs.cfg.taken(), rs.cfg.taken())
	rule(c.take, "-j CT --notrack")

	rule(c.query, "%s -j RETURN", mark(rs.cfg.taken(), rs.cfg.Mark))
	for _, p := range rs.exclude {
		if family(p.Addr()) == fam {
			rule(c.query, "-s %v -j RETURN", p)
		}
	}
	for _, s := range ofFamily(rs.armed, fam) {
		rule(c.query, "-d %v -p %v -m %v --dport %d -m recent --rcheck --seconds %d --name %s --rdest -m socket --nowildcard --transparent -g %s",
			hostPrefix(s), s.Proto, s.Proto, s.Addr.Port(), rs.aliveSeconds(), recentName(rs.slot, fam, s), c.take)
	}

	for _, s := range ofFamily(rs.services, fam) {
		rule(c.reply, "%s -d %v -p %v -m %v --dport %d -j CT --notrack", mark(rs.cfg.taken(), rs.cfg.Mark), hostPrefix(s), s.Proto, s.Proto, s.Addr.Port())
	}
	for _, s := range ofFamily(rs.armed, fam) {
		reply := fmt.Sprintf("-s %v -p %v -m %v --sport %d", hostPrefix(s), s.Proto, s.Proto, s.Addr.Port())
		if s.Proto == TCP { // see RuleSet.process
			reply += " --tcp-flags SYN,RST,PSH PSH"
		}
		renew := fmt.Sprintf("-m recent --set --name %s --rsource", recentName(rs.slot, fam, s))
		rule(c.reply, "%s -o lo %s", reply, renew)
		rule(c.reply, "%s ! -o lo -m statistic --mode random --probability %.6f %s", reply, 1.0/renewOneIn, renew)
	}
	for _, s := range ofFamily(rs.services, fam) {
		rule(c.reply, "-s %v -p %v -m %v --sport %d -j CT --notrack", hostPrefix(s), s.Proto, s.Proto, s.Addr.Port())
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// withJumps makes the text insert the jumps that are missing and delete those
// that are there twice, before its COMMIT. saved is what iptables-save shows.
func (c xtChains) withJumps(text, saved string) string {
	var extra strings.Builder
	for _, jump := range c.jumps() {
		n := countLines(saved, jump)
		if n == 0 {
			fields := strings.Fields(jump) // -A CHAIN -j TARGET: ours goes first
			fmt.Fprintf(&extra, "-I %s 1 -j %s\n", fields[1], fields[3])
		}
		for ; n > 1; n-- {
			fmt.Fprintf(&extra, "-D%s\n", strings.TrimPrefix(jump, "-A"))
		}
	}
	return strings.TrimSuffix(text, "COMMIT\n") + extra.String() + "COMMIT\n"
}

// removal is what iptables-restore --noflush is fed to remove every chain of
// ours that saved shows, except those in keep; empty if there is none.
func removal(saved string, keep func(chain string) bool) string {
	var chains []string
	for line := range strings.Lines(saved) {
		if name, _, ok := strings.Cut(strings.TrimPrefix(line, ":"), " "); ok && strings.HasPrefix(line, ":"+chainPrefix+"-") && !keep(name) {
			chains = append(chains, name)
		}
	}
	if len(chains) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("*raw\n")
	for _, name := range chains {
		fmt.Fprintf(&b, ":%s - [0:0]\n", name)
	}
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		fields := strings.Fields(line)
		for _, name := range chains {
			// A jump from a chain that stays; those in ours were just emptied.
			if len(fields) == 4 && fields[0] == "-A" && fields[2] == "-j" && fields[3] == name && !strings.HasPrefix(fields[1], chainPrefix+"-") {
				fmt.Fprintf(&b, "-D%s\n", strings.TrimPrefix(line, "-A"))
			}
		}
	}
	for _, name := range chains {
		fmt.Fprintf(&b, "-X %s\n", name)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func countLines(text, want string) int {
	n := 0
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == want {
			n++
		}
	}
	return n
}

func hostPrefix(s Service) netip.Prefix {
	return netip.PrefixFrom(s.Addr.Addr(), s.Addr.Addr().BitLen())
}
