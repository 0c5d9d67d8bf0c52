package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nodeLocalComment is in the comment of each of NodeLocal DNSCache's rules.
const nodeLocalComment = "NodeLocal DNS Cache"

// nodeLocalHint names what a NodeLocal DNSCache that was killed has left, if it has:
// with its rules kube-proxy leads nobody to the Service, and nobody answers.
func (d *daemon) nodeLocalHint() string {
	if !usesService(d.config()) {
		return ""
	}
	var names []string
	for _, addr := range d.clusterIPs() {
		// A hint: where the rules cannot be read there is none.
		if untracked, err := nodeLocalUntracks(addr); err == nil && untracked {
			names = append(names, addr.String())
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("; NOTRACK rules of a NodeLocal DNSCache for %s (iptables-save -t raw) keep kube-proxy from leading there", strings.Join(names, ", "))
}

// nodeLocalUntracks reports whether rules of NodeLocal DNSCache exempt an address
// from connection tracking. It sees those of iptables on nf_tables, and those of the
// legacy variant not. In the table raw NodeLocal has no others.
func nodeLocalUntracks(addr netip.Addr) (bool, error) {
	const table = "raw"
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return false, err
	}
	defer func() { _ = c.Close() }() // nothing was written
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return false, err
	}
	of, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_RULE_TABLE, Data: []byte(table + "\x00")}})
	if err != nil {
		return false, err
	}
	family := byte(unix.NFPROTO_IPV4)
	if addr.Is6() {
		family = unix.NFPROTO_IPV6
	}
	rules, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{family, unix.NFNETLINK_V0, 0, 0}, of...),
	})
	if err != nil {
		return false, err
	}
	for _, r := range rules {
		// The address is an operand and the comment a match of its own, each as it is.
		if bytes.Contains(r.Data, []byte(nodeLocalComment)) && bytes.Contains(r.Data, addr.AsSlice()) {
			return true, nil
		}
	}
	return false, nil
}
