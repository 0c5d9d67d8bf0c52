package iptables

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Multicast groups, include/uapi/linux/netfilter/nfnetlink.h and rtnetlink.h.
const (
	groupNFTables = 7
	groupAddress4 = unix.RTNLGRP_IPV4_IFADDR
	groupAddress6 = unix.RTNLGRP_IPV6_IFADDR
	groupRoute4   = unix.RTNLGRP_IPV4_ROUTE
	groupRoute6   = unix.RTNLGRP_IPV6_ROUTE
	groupRule4    = unix.RTNLGRP_IPV4_RULE
	groupRule6    = unix.RTNLGRP_IPV6_RULE
)

// keepOctets is how much of a notification is kept: its content is not read,
// since what counts is what the kernel has when we look.
const keepOctets = unix.NLMSG_HDRLEN

// watcher tells that somebody changed something in the kernel. It does not say
// what; many changes may be told as one, and missed ones count as a change.
type watcher struct {
	kick  chan struct{}
	conns []*netlink.Conn
	done  sync.WaitGroup
}

// watch subscribes to multicast groups by netlink protocol. Close the watcher.
func watch(groups map[int][]uint32) (*watcher, error) {
	w := &watcher{kick: make(chan struct{}, 1)}
	for protocol, list := range groups {
		if err := w.subscribe(protocol, list); err != nil {
			return nil, errors.Join(fmt.Errorf("watch the kernel: %w", err), w.close())
		}
	}
	return w, nil
}

func (w *watcher) subscribe(protocol int, groups []uint32) error {
	c, err := netlink.Dial(protocol, nil)
	if err != nil {
		return err
	}
	w.conns = append(w.conns, c)
	// A transaction of kube-proxy can be a megabyte: the kernel cuts what it
	// queues for us down to a header.
	filter, err := bpf.Assemble([]bpf.Instruction{bpf.RetConstant{Val: keepOctets}})
	if err != nil {
		return err
	}
	if err := c.SetBPF(filter); err != nil {
		return err
	}
	for _, g := range groups {
		if err := c.JoinGroup(g); err != nil {
			return err
		}
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	w.done.Go(func() { w.read(raw) })
	return nil
}

// read kicks for every notification, until the socket is closed.
func (w *watcher) read(raw syscall.RawConn) {
	buf := make([]byte, keepOctets)
	for {
		var got error
		err := raw.Read(func(fd uintptr) bool {
			_, _, got = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return !errors.Is(got, unix.EAGAIN)
		})
		if err != nil { // closed
			return
		}
		// Any other error, such as ENOBUFS for a queue that overflowed, means
		// that there was something.
		select {
		case w.kick <- struct{}{}:
		default:
		}
	}
}

func (w *watcher) close() error {
	var errs []error
	for _, c := range w.conns {
		errs = append(errs, c.Close())
	}
	w.done.Wait()
	return errors.Join(errs...)
}
