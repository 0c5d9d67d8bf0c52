package ctguard_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/ctguard/ctguardtest"
)

// A guard on a table in memory. On a node, the table is that of OpenKernel,
// which also reports events and tells timeouts.
func ExampleGuard() {
	table := &ctguardtest.Table{}
	ctx, cancel := context.WithCancel(context.Background())
	g, err := ctguard.New(ctguard.Config{
		Table: table, Events: table, Host: table,
		OnPurge: func(p ctguard.Purge) {
			fmt.Println(p.Flow, p.Reason)
			cancel()
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	table.Set(flow(40000, "10.96.0.10:53", "10.244.0.3:53"))
	g.Update(&ctguard.Snapshot{Services: []ctguard.Service{{
		Name:  "kube-system/kube-dns",
		Addrs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports: []ctguard.Port{{Name: "dns", Port: 53, Endpoints: []ctguard.Endpoint{
			{Addr: netip.MustParseAddrPort("10.244.0.4:53"), Serving: true},
		}}},
	}}})
	if err := g.Run(ctx); err != nil {
		fmt.Println(err)
	}
	// Output: 10.244.1.1:40000 -> 10.96.0.10:53 => 10.244.0.3:53 endpoint-gone
}
