package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver/search"
)

func rulesCommand() command {
	return command{
		name:    "rules",
		summary: "print the interception's rule set as text, without applying it",
		example: "dnsguard rules --config /etc/dnsguard/config.yaml --backend nftables",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			backend := fs.String("backend", "", "nftables or iptables (default: intercept.backend, nftables for auto)")
			_, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "rules", args) {
					return exitUsage
				}
				switch *backend {
				case "", string(iptables.NFTables), string(iptables.IPTables):
				default:
					fmt.Fprintf(c.err, "dnsguard rules: --backend: %q is neither nftables nor iptables\n", *backend)
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("rules", err)
				}
				text, err := rulesText(ctx, cfg, iptables.Backend(*backend))
				if err != nil {
					return c.fail("rules", err)
				}
				fmt.Fprint(c.out, text)
				return exitOK
			}
		},
	}
}

// rulesText returns the rule set that run would apply.
func rulesText(ctx context.Context, cfg *config.Config, backend iptables.Backend) (string, error) {
	accounting := ""
	if cfg.Guard.Enabled && cfg.Guard.Evidence {
		accounting = iptables.AccountingText()
	}
	if cfg.Intercept.Mode == config.InterceptNone {
		if accounting == "" {
			return "", errors.New("intercept.mode is none: there are no rules; set it to link-local or cluster-ip")
		}
		return accounting, nil
	}
	clusterIPs, err := clusterIPsOf(ctx, cfg)
	if err != nil && cfg.Intercept.Mode == config.InterceptClusterIP {
		return "", err
	}
	c := iptablesConfig(cfg, clusterIPs, nil)
	rs, err := iptables.NewRuleSet(c)
	if err != nil {
		return "", err
	}
	if backend == "" {
		backend = c.Backend
	}
	text := rs.Text(backend)
	if accounting == "" {
		return text, nil
	}
	if backend == iptables.IPTables {
		text += "\n# nft -f -" // whatever takes the packets
	}
	return text + "\n" + accounting, nil
}

// clusterTimeout is how long rules waits for the cluster's word. The API server
// may be out of reach.
const clusterTimeout = 2 * time.Second

// clusterIPsOf returns the addresses of the cluster's DNS Service as the cluster
// says or, where that is not to be had, as the environment does.
func clusterIPsOf(ctx context.Context, cfg *config.Config) ([]netip.Addr, error) {
	alone := *cfg
	alone.Guard.Enabled, alone.Search.Collapse, alone.Search.Expand = false, false, false
	alone.Intercept.Mode = config.InterceptNone // no pods are needed
	d := &daemon{
		log: slog.New(slog.DiscardHandler), cfg: &alone, conditions: newConditions(nil),
		clusterChanged: make(chan struct{}, 1), serviceChanged: make(chan struct{}, 1),
	}
	policy, err := search.New(search.Config{ClusterDomain: cfg.ClusterDomain, NDots: cfg.Search.NDots})
	if err != nil {
		return nil, fmt.Errorf("search: %w", err)
	}
	// An error means that this is no place to reach the cluster from.
	if watcher, _ := d.newWatcher(&alone, policy); watcher != nil {
		ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
		d.follow(ctx, watcher)
		for known := false; !known && ctx.Err() == nil; {
			select {
			case <-d.clusterChanged:
				known = d.cluster.Load().DNS != nil
			case <-ctx.Done():
			}
		}
		cancel()
		d.following.Load().end()
	}
	if ips := d.clusterIPs(); len(ips) > 0 {
		return ips, nil
	}
	return nil, d.serviceUnknown(cfg)
}

// leavePage is where the control socket takes the order to leave.
const leavePage = "/leave"

// leaveTimeout is how long cleanup waits for a daemon that was told to leave.
const leaveTimeout = 10 * time.Second

func cleanupCommand() command {
	return command{
		name:    "cleanup",
		summary: "remove every rule, route and set of ours; a running daemon is told to leave first",
		example: "dnsguard cleanup --config /etc/dnsguard/config.yaml",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			_, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "cleanup", args) {
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("cleanup", err)
				}
				removed, err := cleanup(ctx, cfg.Control)
				if err != nil {
					return c.fail("cleanup", err)
				}
				fmt.Fprintf(c.out, "removed %d\n", removed)
				return exitOK
			}
		},
	}
}

// cleanup has the running daemon leave, if there is one, and removes the rest.
func cleanup(ctx context.Context, control string) (removed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	_, told := postDaemon(ctx, control, leavePage)
	if told != nil && !errors.Is(told, errNoDaemon) {
		return 0, told
	}
	for {
		removed, err = iptables.Cleanup()
		switch {
		case !errors.Is(err, iptables.ErrRunning):
			return removed, err
		case told != nil:
			return 0, fmt.Errorf("%w; end it first: %w", err, told)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return 0, fmt.Errorf("%w, and has not ended %v after it was told to; end it first", err, leaveTimeout)
		}
	}
}

// leaveHTTP tells the daemon to end as SIGTERM does.
func (d *daemon) leaveHTTP(w http.ResponseWriter, _ *http.Request) {
	d.log.Info("told to leave over the control socket")
	fmt.Fprintln(w, "leaving")
	d.leave()
}
