package lab

import (
	"errors"
	"fmt"
	"net/netip"
)

// ErrUnavailable reports that this machine cannot hold a laboratory; the error
// that wraps it says why.
var ErrUnavailable = errors.New("no laboratory on this machine (it needs root and a kernel with network namespaces, veth, nftables nat and conntrack)")

// Available tells whether this machine can hold a laboratory, by making the
// smallest one; nil if so, else an error that wraps ErrUnavailable.
func Available() error {
	if err := probe(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return nil
}

func probe() (err error) {
	l, err := New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := l.DNS.SetEndpoints(netip.AddrPortFrom(l.Node.IP4, dnsPort)); err != nil {
		return err
	}
	_, err = l.Node.Flows()
	return err
}
