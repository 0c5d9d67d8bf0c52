package main

import (
	"context"
	"time"

	"github.com/dnsguard/dnsguard/iptables"
)

// accountingCheck is how often the daemon looks whether the kernel still counts
// the packets of flows: others may write the sysctl, and a reload may want it.
const accountingCheck = 2 * time.Second

// keepAccounting has the kernel count packets while guard.evidence wants that,
// until ctx ends.
func (d *daemon) keepAccounting(ctx context.Context) {
	var a iptables.Accounting
	defer func() {
		if err := a.Close(); err != nil {
			d.log.Warn("leaving the table that has the kernel count packets of flows", "error", err)
		}
	}()
	tick := time.NewTicker(accountingCheck)
	defer tick.Stop()
	failure := ""
	for {
		text := ""
		if g := d.config().Guard; g.Enabled && g.Evidence {
			changed, err := a.Ensure()
			switch {
			case err != nil:
				text = err.Error() + "; guard.evidence sees only flows that never had a reply: set net.netfilter.nf_conntrack_acct=1 on the node"
			case changed:
				d.log.Info("the kernel counts the packets of flows to come, for guard.evidence")
			}
		} else if err := a.Close(); err != nil {
			d.log.Warn("the table that has the kernel count packets of flows", "error", err)
		}
		if text != failure && text != "" {
			d.log.Warn("guard.evidence", "error", text)
		}
		failure = text
		d.conditions.warn("guard evidence", text)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
