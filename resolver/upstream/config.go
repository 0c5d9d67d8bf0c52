package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Config says whom to ask and how patiently.
type Config struct {
	// Routes say who answers for which zones; the longest zone wins. A name
	// below none of them gets an Error with reason NoServers.
	Routes   []Route
	Timeouts Timeouts
	Budget   Budget
	// Control, if not nil, is called on each new socket before it is
	// connected (net.Dialer.Control): for socket marks.
	Control func(network, address string, c syscall.RawConn) error
	// Self, if not nil, tells that an address is one that this process
	// answers on: a forwarder that asks itself loops.
	Self func(netip.AddrPort) bool
	// Dial, if not nil, makes the sockets in place of net.Dialer, network
	// being "udp" or "tcp": the seam for tests. A UDP socket is connected,
	// and each Read returns one datagram.
	Dial func(ctx context.Context, network string, server netip.AddrPort) (net.Conn, error)
	// OnServers, if not nil, is told each change of a watched file's
	// nameservers, and each error that keeps the old ones in use.
	OnServers func(file string, servers []netip.AddrPort, err error)
	// OnHealth, if not nil, is told when a server stops or resumes answering
	// over a transport. It must not block.
	OnHealth func(Health)
}

// Route sends the questions for some zones to some servers.
type Route struct {
	Zones []string // presentation form; "." is every name
	// Servers are asked in order: the first that is healthy gets every
	// question, the next only what it leaves unanswered, as resolv.conf(5)
	// has it. They need not hold the same data (an internal server before a
	// public one), so the fastest is not the best.
	Servers  []Server
	Protocol Protocol
}

// Server is one server, or the nameservers of a file: exactly one field is set.
type Server struct {
	Addr netip.AddrPort
	File string // in the form of resolv.conf(5), watched for changes
}

// Protocol says over which transports a route's servers are asked.
type Protocol uint8

// The protocols.
const (
	// Auto: UDP, and TCP where an answer is truncated or UDP goes unanswered.
	Auto Protocol = iota
	// UDPOnly: a truncated answer becomes an Error with reason Truncated.
	UDPOnly
	// TCPOnly: no UDP at all.
	TCPOnly
)

// Timeouts are counted from the start of an exchange, but for Hedge.
type Timeouts struct {
	Hedge time.Duration // from the question's sending; 0: about three smoothed round trips
	Retry time.Duration // 0: 700 ms
	Total time.Duration // 0: 1.5 s
}

// Budget bounds the questions that are asked again, in per cent of the recent
// questions of a route; both together stay below the larger of the two. It is
// taken as it is: zero is none.
type Budget struct {
	Hedge int
	Retry int
}

const (
	defaultRetry = 700 * time.Millisecond
	defaultTotal = 1500 * time.Millisecond
	maxServers   = 64 // per route: an exchange keeps them in one word
)

// withDefaults returns the configuration with its defaults filled in, or every
// problem with it.
func (c Config) withDefaults() (Config, error) {
	if c.Timeouts.Retry == 0 {
		c.Timeouts.Retry = defaultRetry
	}
	if c.Timeouts.Total == 0 {
		c.Timeouts.Total = defaultTotal
	}
	var problems []error
	if c.Timeouts.Hedge < 0 || c.Timeouts.Retry < 0 || c.Timeouts.Total < 0 {
		problems = append(problems, errors.New("a timeout is negative"))
	}
	if min(c.Budget.Hedge, c.Budget.Retry) < 0 || max(c.Budget.Hedge, c.Budget.Retry) > 100 {
		problems = append(problems, fmt.Errorf("budget hedge %d, retry %d: not a percentage", c.Budget.Hedge, c.Budget.Retry))
	}
	if len(c.Routes) == 0 {
		problems = append(problems, errors.New("no routes"))
	}
	for i := range c.Routes {
		if err := c.Routes[i].check(c.Self); err != nil {
			problems = append(problems, fmt.Errorf("route %d: %w", i, err))
		}
	}
	if c.Dial == nil {
		c.Dial = (&dialer{net.Dialer{Control: c.Control}}).dial
	}
	return c, errors.Join(problems...)
}

func (r *Route) check(self func(netip.AddrPort) bool) error {
	if len(r.Zones) == 0 {
		return errors.New("no zones")
	}
	if r.Protocol > TCPOnly {
		return fmt.Errorf("protocol %d unknown", r.Protocol)
	}
	if len(r.Servers) == 0 {
		return ErrNoServers
	}
	for _, s := range r.Servers {
		switch {
		case (s.File != "") == s.Addr.IsValid():
			return fmt.Errorf("server %v, file %q: want exactly one of them", s.Addr, s.File)
		case s.File == "" && s.Addr.Port() == 0:
			return fmt.Errorf("server %v: no port", s.Addr)
		case s.File == "" && self != nil && self(s.Addr):
			return fmt.Errorf("server %v: %w", s.Addr, errSelf)
		}
	}
	return nil
}

// zoneKey returns a zone's name in folded wire form.
func zoneKey(zone string) (string, error) {
	var buf [dnswire.MaxNameLen + 1]byte
	n, err := dns.PackDomainName(dns.Fqdn(zone), buf[:], 0, nil, false)
	if err != nil {
		return "", fmt.Errorf("zone %q: %w", zone, err)
	}
	return string(dnswire.AppendFolded(nil, buf[:n])), nil
}
