package iptables

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// table is an nftables table of family inet, as data.
type table struct {
	name   string
	owner  bool // the kernel removes it when the netlink socket closes; Linux 5.12
	sets   []set
	chains []chain
}

// keyPart is a part of a set's key.
type keyPart uint8

const (
	keyAddr keyPart = iota
	keyProto
	keyPort
)

// set is an nftables set whose key starts with an address of one family.
type set struct {
	name     string
	fam      int
	key      []keyPart
	dynamic  bool          // rules add to it
	timed    bool          // elements may have timeouts
	timeout  time.Duration // of elements that do not have their own
	size     uint32        // most elements, zero: no limit
	interval bool          // elements are prefixes
	services []Service     // the elements, with key address, protocol and port
	prefixes []netip.Prefix
}

// constant reports whether only we change the elements.
func (s *set) constant() bool { return !s.dynamic && !s.timed }

// chain is a list of rules, attached to a hook or called by others.
type chain struct {
	name  string
	hook  *hook
	rules []rule
}

// hook is where a base chain is attached, with policy accept.
type hook struct {
	kind     string // "filter", or "route": packets whose mark changed are routed again (family inet: Linux 5.2)
	point    uint32 // NF_INET_*
	name     string // of the point
	priority int32
}

type rule []statement

// String is the table in nft's syntax.
func (t *table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", t.name)
	if t.owner {
		b.WriteString("\tflags owner\n\n")
	}
	for i := range t.sets {
		b.WriteString(t.sets[i].String())
	}
	for i, c := range t.chains {
		if i > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "\tchain %s {\n", c.name)
		if h := c.hook; h != nil {
			fmt.Fprintf(&b, "\t\ttype %s hook %s priority %d; policy accept;\n", h.kind, h.name, h.priority)
		}
		for _, r := range c.rules {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// String is the set in nft's syntax.
func (s *set) String() string {
	parts := make([]string, len(s.key))
	for i, k := range s.key {
		parts[i] = [...]string{[2]string{"ipv4_addr", "ipv6_addr"}[s.fam], "inet_proto", "inet_service"}[k]
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\tset %s {\n\t\ttype %s\n", s.name, strings.Join(parts, " . "))
	if s.size > 0 {
		fmt.Fprintf(&b, "\t\tsize %d\n", s.size)
	}
	var flags []string
	if s.interval {
		flags = append(flags, "interval")
	}
	if s.dynamic {
		flags = append(flags, "dynamic")
	}
	if s.timed {
		flags = append(flags, "timeout")
	}
	if len(flags) > 0 {
		fmt.Fprintf(&b, "\t\tflags %s\n", strings.Join(flags, ","))
	}
	if s.timeout > 0 {
		fmt.Fprintf(&b, "\t\ttimeout %s\n", durationText(s.timeout))
	}
	var elements []string
	for _, v := range s.services {
		elements = append(elements, fmt.Sprintf("%v . %v . %d", v.Addr.Addr(), v.Proto, v.Addr.Port()))
	}
	for _, p := range s.prefixes {
		if p.IsSingleIP() {
			elements = append(elements, p.Addr().String())
		} else {
			elements = append(elements, p.String())
		}
	}
	if len(elements) > 0 {
		fmt.Fprintf(&b, "\t\telements = { %s }\n", strings.Join(elements, ",\n\t\t\t     "))
	}
	b.WriteString("\t}\n\n")
	return b.String()
}

// String is the rule in nft's syntax.
func (r rule) String() string {
	parts := make([]string, len(r))
	for i, s := range r {
		parts[i] = s.String()
	}
	return strings.Join(parts, " ")
}
