package iptables

import (
	"fmt"
	"math/bits"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of Config, and its bounds.
const (
	DefaultMark         = 0x30
	DefaultTable        = 5353
	DefaultRulePriority = 1
	DefaultZone         = 5353
	DefaultAliveTimeout = time.Second
	// MinAliveTimeout leaves room for two probes on a machine that is short of
	// CPU.
	MinAliveTimeout = 500 * time.Millisecond
)

// kubeProxyMarks are the bits that kube-proxy sets on packets to masquerade
// (--iptables-masquerade-bit, 14) and to drop (15, fixed).
const kubeProxyMarks = 0x4000 | 0x8000

// Proto is a transport protocol by its IP protocol number.
type Proto uint8

// The two transports of DNS, RFC 1035 section 4.2.
const (
	TCP Proto = unix.IPPROTO_TCP
	UDP Proto = unix.IPPROTO_UDP
)

// protos lists both in the order in which rule sets show them.
func protos() [2]Proto { return [2]Proto{UDP, TCP} }

// String returns "udp" or "tcp".
func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// Service is one thing that is intercepted, and withdrawn, on its own.
type Service struct {
	Addr  netip.AddrPort
	Proto Proto
}

// String returns for example "udp 10.96.0.10:53".
func (s Service) String() string { return s.Proto.String() + " " + s.Addr.String() }

func (s Service) compare(o Service) int {
	if c := s.Addr.Compare(o.Addr); c != 0 {
		return c
	}
	return int(o.Proto) - int(s.Proto) // UDP first
}

// IPv4 and IPv6 select the services of one family for Withdraw and Restore,
// All every one.
func IPv4(s Service) bool { return s.Addr.Addr().Is4() }

// IPv6 selects the services of that family.
func IPv6(s Service) bool { return s.Addr.Addr().Is6() }

// All selects every service.
func All(Service) bool { return true }

// Config is what an interception is made of. Zero fields take the defaults.
type Config struct {
	Targets
	Backend Backend
	// Mark holds two bits of the packet mark: the lower one marks packets that
	// were taken, the higher one our own upstream queries (MarkUpstream). All
	// other bits are left as they are.
	Mark uint32
	// Table is the number of the routing table that delivers marked packets.
	Table int
	// RulePriority is the priority of the routing rule that leads there.
	RulePriority int
	// Zone is the conntrack zone of the link-local fallback.
	Zone uint16
	// AliveTimeout is how long packets are taken after the last answer left.
	AliveTimeout time.Duration

	// Probe is a packed DNS query that the service answers from its own
	// knowledge, at once. It is asked twice in AliveTimeout while an address is
	// silent; any message with its id is an answer. Required.
	Probe []byte
	// Received returns how often the client has been seen by the service:
	// datagrams read, connections accepted. It is compared with what the
	// kernel took from that client. nil: nobody is ever bypassed.
	Received func(Client) uint64
	// Dropped, if not nil, returns how many datagrams the kernel has dropped so
	// far because the service's sockets were full. While that changes, what does
	// not arrive says nothing about a client.
	Dropped func() uint64
	// OnEvent, if not nil, is told what happens, one at a time. It must not
	// block, nor call the Interceptor.
	OnEvent func(Event)
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() Config {
	if c.Mark == 0 {
		c.Mark = DefaultMark
	}
	if c.Table == 0 {
		c.Table = DefaultTable
	}
	if c.RulePriority == 0 {
		c.RulePriority = DefaultRulePriority
	}
	if c.Zone == 0 {
		c.Zone = DefaultZone
	}
	if c.AliveTimeout == 0 {
		c.AliveTimeout = DefaultAliveTimeout
	}
	if c.Backend == "" {
		c.Backend = Auto
	}
	return c
}

// validate finds what is wrong without asking the kernel.
func (c *Config) validate() error {
	if bits.OnesCount32(c.Mark) != 2 {
		return &ConfigError{
			Key: "intercept.mark", Problem: fmt.Sprintf("%#x has %d bits set", c.Mark, bits.OnesCount32(c.Mark)),
			Remedy: "give two bits that nothing else on the node uses, for example 0x30",
		}
	}
	if c.Mark&kubeProxyMarks != 0 {
		return &ConfigError{
			Key: "intercept.mark", Problem: fmt.Sprintf("%#x contains a bit of kube-proxy (0x4000, 0x8000)", c.Mark),
			Remedy: "give two bits that nothing else on the node uses, for example 0x30",
		}
	}
	// 253 to 255 are the kernel's own tables, include/uapi/linux/rtnetlink.h.
	if c.Table < 1 || c.Table >= 253 && c.Table <= 255 {
		return &ConfigError{
			Key: "intercept.table", Problem: fmt.Sprintf("%d is no free routing table", c.Table),
			Remedy: "give a number from 1, except 253 to 255, which are the kernel's",
		}
	}
	if c.RulePriority < 1 {
		return &ConfigError{
			Key: "intercept.rulePriority", Problem: fmt.Sprintf("%d", c.RulePriority),
			Remedy: "give a number from 1; the lowest that is free is best",
		}
	}
	if c.AliveTimeout < MinAliveTimeout {
		return &ConfigError{
			Key: "intercept.aliveTimeout", Problem: fmt.Sprintf("%v is too short to tell a busy process from a hung one", c.AliveTimeout),
			Remedy: fmt.Sprintf("give at least %v", MinAliveTimeout),
		}
	}
	if !c.Backend.known() {
		return &ConfigError{
			Key: "intercept.backend", Problem: fmt.Sprintf("%q is none", c.Backend),
			Remedy: "give auto, nftables or iptables",
		}
	}
	return c.Targets.validate()
}

// taken and own are the two bits of the mark.
func (c *Config) taken() uint32 { return 1 << bits.TrailingZeros32(c.Mark) }
func (c *Config) own() uint32   { return c.Mark &^ c.taken() }

// family is 0 for IPv4 and 1 for IPv6, an index.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}
