package main

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// The two ends of the wire. Nothing but the namespaces ever sees them.
const (
	serverAddr = "10.99.0.1"
	clientAddr = "10.99.0.2"
)

// network is a server's and a client's namespace, joined by one veth pair: no
// bridge, no rules, no connection tracking.
type network struct {
	server, client *lab.Namespace
}

func newNetwork() (_ *network, err error) {
	n := &network{}
	defer func() {
		if err != nil {
			_ = n.close()
		}
	}()
	if n.server, err = lab.NewNamespace("server"); err != nil {
		return nil, err
	}
	if n.client, err = lab.NewNamespace("client"); err != nil {
		return nil, err
	}
	var peer netns.NsHandle
	if err := n.client.Do(func() error { peer, err = netns.Get(); return err }); err != nil {
		return nil, fmt.Errorf("open the client's namespace: %w", err)
	}
	defer func() { _ = peer.Close() }()

	const serverLink, clientLink = "server0", "client0"
	err = n.server.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = serverLink
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: clientLink, PeerNamespace: netlink.NsFd(int(peer))}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("join the namespaces: %w", err)
		}
		return configure(serverLink, serverAddr)
	})
	if err != nil {
		return nil, err
	}
	if err := n.client.Do(func() error { return configure(clientLink, clientAddr) }); err != nil {
		return nil, err
	}
	return n, n.server.Do(func() error { return awaitCarrier(serverLink) })
}

func configure(name, addr string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	subnet := &net.IPNet{IP: net.ParseIP(addr), Mask: net.CIDRMask(24, 32)}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: subnet}); err != nil {
		return fmt.Errorf("add address %s to %s: %w", addr, name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// awaitCarrier polls, for a veth has no event of its own that says "packets pass".
func awaitCarrier(name string) error {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
	}
	return fmt.Errorf("link %s has no carrier", name)
}

func (n *network) close() error {
	var errs []error
	for _, ns := range []*lab.Namespace{n.server, n.client} {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}
