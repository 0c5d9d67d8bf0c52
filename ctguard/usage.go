package ctguard

import (
	"fmt"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/conntrack"
	"github.com/ti-mo/netfilter"
)

// Usage is how full the connection tracking table is, and what that costs.
type Usage struct {
	Entries uint64 // of this network namespace
	Limit   uint64 // nf_conntrack_max, 0 if unknown

	// Since boot, of all CPUs:

	// InsertFailed counts packets dropped because an entry for the same
	// tuple was there already: the 5 s lookups of clients that send A and
	// AAAA from one socket.
	InsertFailed uint64
	// Drop counts packets dropped since the table was full.
	Drop uint64
	// EarlyDrop counts entries evicted since the table was full.
	EarlyDrop uint64
}

// Usage asks the kernel. Minimum: Linux 3.6; for Limit 4.18.
func (k *Kernel) Usage() (Usage, error) {
	u, err := k.tableSize()
	if err != nil {
		return Usage{}, fmt.Errorf("read conntrack table size: %w", err)
	}
	c, err := conntrack.Dial(&netlink.Config{NetNS: k.ns})
	if err != nil {
		return Usage{}, fmt.Errorf("open netfilter socket: %w", err)
	}
	defer func() { _ = c.Close() }()
	cpus, err := c.Stats()
	if err != nil {
		return Usage{}, fmt.Errorf("read conntrack statistics: %w", err)
	}
	for _, cpu := range cpus {
		u.InsertFailed += uint64(cpu.InsertFailed)
		u.Drop += uint64(cpu.Drop)
		u.EarlyDrop += uint64(cpu.EarlyDrop)
	}
	return u, nil
}

// tableSize reads Entries and Limit. (The library's StatsGlobal waits for ever
// with mdlayher/netlink 1.10 and newer: it takes the kernel's single answer
// for the first part of several.)
func (k *Kernel) tableSize() (u Usage, err error) {
	const (
		ctGetStats             = 5 // IPCTNL_MSG_CT_GET_STATS
		ctaStatsGlobalEntries  = 1 // CTA_STATS_GLOBAL_ENTRIES
		ctaStatsGlobalMaxEntry = 2 // CTA_STATS_GLOBAL_MAX_ENTRIES, Linux 4.18
	)
	req, err := request(ctGetStats, netfilter.ProtoUnspec, 0, nil)
	if err != nil {
		return u, err
	}
	t, err := k.dial()
	if err != nil {
		return u, err
	}
	defer func() { _ = t.Close() }()
	if err := t.send([]netlink.Message{req}); err != nil {
		return u, err
	}
	buf := make([]byte, answerSize)
	n, err := t.receive(buf)
	if err != nil {
		return u, err
	}
	err = messages(buf[:n], func(h netlink.Header, data []byte) error {
		if h.Type == netlink.Error {
			return errno(data)
		}
		_, ad, err := netfilter.DecodeNetlink(netlink.Message{Header: h, Data: data})
		if err != nil {
			return err
		}
		for ad.Next() {
			switch ad.Type() {
			case ctaStatsGlobalEntries:
				u.Entries = uint64(ad.Uint32())
			case ctaStatsGlobalMaxEntry:
				u.Limit = uint64(ad.Uint32())
			}
		}
		return ad.Err()
	})
	return u, err
}
