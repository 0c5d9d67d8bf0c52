package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/iptables"
)

func rulesCommand() command {
	return command{
		name:    "rules",
		summary: "print the interception's rule set as text, without applying it",
		example: "dnsguard rules --config /etc/dnsguard/config.yaml --backend nftables",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			backend := fs.String("backend", "", "nftables or iptables (default: intercept.backend, nftables for auto)")
			_, load := configFlags(fs)
			return func(_ context.Context, c *cli, args []string) int {
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
				text, err := rulesText(cfg, iptables.Backend(*backend))
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
func rulesText(cfg *config.Config, backend iptables.Backend) (string, error) {
	if cfg.Intercept.Mode == config.InterceptNone {
		return "", errors.New("intercept.mode is none: there are no rules; set it to link-local or cluster-ip")
	}
	var clusterIPs []netip.Addr
	service, err := serviceAddr(cfg.Kubernetes.DNSService)
	switch {
	case err == nil:
		clusterIPs = append(clusterIPs, service.Addr())
	case cfg.Intercept.Mode == config.InterceptClusterIP:
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
	return rs.Text(backend), nil
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
	_, err = postDaemon(ctx, control, leavePage)
	if err != nil && !errors.Is(err, errNoDaemon) {
		return 0, err
	}
	for {
		removed, err = iptables.Cleanup()
		if !errors.Is(err, iptables.ErrRunning) {
			return removed, err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return 0, fmt.Errorf("%w; end it first (its control socket, control: %s, does not reach it)", err, control)
		}
	}
}

// leaveHTTP tells the daemon to end as SIGTERM does.
func (d *daemon) leaveHTTP(w http.ResponseWriter, _ *http.Request) {
	d.log.Info("told to leave over the control socket")
	fmt.Fprintln(w, "leaving")
	d.leave()
}
