package lab

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/ti-mo/conntrack"
	"golang.org/x/sys/unix"
)

// Flow is a connection-tracking entry of UDP port 53.
type Flow struct {
	Client   netip.AddrPort // original source
	Frontend netip.AddrPort // original destination: what the client asked
	Endpoint netip.AddrPort // reply source: who answers, or should
	Timeout  time.Duration  // until the kernel forgets it
	Replied  bool           // an answer has been seen
	Assured  bool           // lives for nf_conntrack_udp_timeout_stream (120 s)
	Zone     uint16

	// What the kernel knows the entry by.
	original, reply conntrack.Tuple
}

// String tells where the flow leads.
func (f Flow) String() string {
	return fmt.Sprintf("%v -> %v, answered by %v, %v left", f.Client, f.Frontend, f.Endpoint, f.Timeout)
}

// Flows lists the namespace's tracked UDP flows whose original destination
// port is 53.
func (n *Namespace) Flows() ([]Flow, error) {
	var flows []Flow
	err := n.conntrack(func(c *conntrack.Conn) error {
		entries, err := c.Dump(nil)
		if err != nil {
			return fmt.Errorf("list flows in %s: %w", n, err)
		}
		for _, e := range entries {
			if orig := e.TupleOrig.Proto; orig.Protocol != unix.IPPROTO_UDP || orig.DestinationPort != dnsPort {
				continue
			}
			flows = append(flows, Flow{
				Client:   netip.AddrPortFrom(e.TupleOrig.IP.SourceAddress, e.TupleOrig.Proto.SourcePort),
				Frontend: netip.AddrPortFrom(e.TupleOrig.IP.DestinationAddress, e.TupleOrig.Proto.DestinationPort),
				Endpoint: netip.AddrPortFrom(e.TupleReply.IP.SourceAddress, e.TupleReply.Proto.SourcePort),
				Timeout:  time.Duration(e.Timeout) * time.Second,
				Replied:  e.Status.SeenReply(),
				Assured:  e.Status.Assured(),
				Zone:     e.Zone,
				original: e.TupleOrig,
				reply:    e.TupleReply,
			})
		}
		return nil
	})
	return flows, err
}

// FlowOf returns the flow with the given original source and destination.
func (n *Namespace) FlowOf(client, frontend netip.AddrPort) (Flow, bool, error) {
	flows, err := n.Flows()
	for _, f := range flows {
		if f.Client == client && f.Frontend == frontend {
			return f, true, nil
		}
	}
	return Flow{}, false, err
}

// DeleteFlow makes the kernel forget a flow; the next packet of the client
// meets the rules again.
func (n *Namespace) DeleteFlow(f Flow) error {
	return n.conntrack(func(c *conntrack.Conn) error {
		if err := c.Delete(conntrack.Flow{TupleOrig: f.original, TupleReply: f.reply, Zone: f.Zone}); err != nil {
			return fmt.Errorf("delete flow %v in %s: %w", f, n, err)
		}
		return nil
	})
}

// conntrack runs f with a ctnetlink connection of the namespace.
func (n *Namespace) conntrack(f func(*conntrack.Conn) error) error {
	return n.Do(func() error {
		c, err := conntrack.Dial(nil)
		if err != nil {
			return fmt.Errorf("connect to conntrack in %s: %w", n, err)
		}
		defer func() { _ = c.Close() }()
		return f(c)
	})
}
