package iptables

import "net/netip"

// CheckAddresses returns an *AddressError if an interface has one of the
// addresses. Call it before Listen: sockets of ours would share an address
// with whoever serves it there.
func CheckAddresses(addrs []netip.Addr) error { return checkAddresses(addrs) }
