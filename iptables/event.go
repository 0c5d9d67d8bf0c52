package iptables

import "net/netip"

// EventKind says what an Event is about.
type EventKind string

// The kinds of events.
const (
	// Taking: packets to Service are taken from now on.
	Taking EventKind = "taking"
	// Withdrawn: packets to Service take the kube-proxy path from now on.
	Withdrawn EventKind = "withdrawn"
	// Bypassed: Client's packets were taken but never arrived at the service;
	// they take the kube-proxy path for a while.
	Bypassed EventKind = "bypassed"
	// Returned: Client is taken again.
	Returned EventKind = "returned"
	// Repaired: something had removed rules, routes or routing rules of ours.
	Repaired EventKind = "repaired"
	// RepairFailed: they could not be put back; it is tried again.
	RepairFailed EventKind = "repair failed"
	// ForeignRule: a routing rule of somebody else sorts before ours and may
	// lead packets away that we marked. Detail shows it.
	ForeignRule EventKind = "foreign rule"
	// ForeignRoute: a route of somebody else was in the place of ours in our
	// table, and was removed. Detail shows it.
	ForeignRoute EventKind = "foreign route"
)

// ReasonSilent is the reason of a withdrawal that the kernel made: no answer
// had left the sockets for AliveTimeout.
const ReasonSilent = "silent"

// Event is something that an operator wants to know. Fields that do not
// belong to the kind are zero.
type Event struct {
	Kind    EventKind
	Service Service
	Client  Client
	Reason  string // of a withdrawal: ReasonSilent or what Withdraw was given
	Detail  string
	Err     error
}

// Client is one client as both sides count it: the kernel what it took
// (datagrams, connection attempts), the service what arrived.
type Client struct {
	Addr  netip.Addr
	Proto Proto
}

// String returns for example "udp from 10.244.0.7".
func (c Client) String() string { return c.Proto.String() + " from " + c.Addr.String() }
