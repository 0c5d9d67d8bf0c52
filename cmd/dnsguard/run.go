package main

import (
	"context"
	"errors"
	"flag"
	"net"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/internal/kube"
	"github.com/dnsguard/dnsguard/iptables"
)

func runCommand() command {
	return command{
		name:    "run",
		summary: "answer queries (foreground; SIGTERM drains and leaves, SIGHUP or a changed file reloads)",
		example: "dnsguard run --listen 127.0.0.1:5353",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			path, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "run", args) {
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("run", err)
				}
				if err := run(ctx, c, cfg, *path, load); err != nil {
					return c.fail("run", err)
				}
				return exitOK
			}
		},
	}
}

// run is the life of the daemon: it returns when ctx has ended and everything
// that was received has been answered, or when it cannot start.
func run(ctx context.Context, c *cli, cfg *config.Config, path string, load func() (*config.Config, error)) error {
	hup := make(chan os.Signal, 1) // before anybody takes us for started: without a listener it ends a process
	signal.Notify(hup, unix.SIGHUP)
	defer signal.Stop(hup)
	log, level := newLogger(c.err, cfg.Log)
	kube.RouteLogs(log.Handler())
	log.Info("starting", "version", version, "config", path, "hash", cfg.Hash())
	d, err := newDaemon(ctx, cfg, log, level)
	if err != nil {
		return err
	}
	ctx, d.leave = context.WithCancel(ctx)
	defer d.leave()
	var pages sync.WaitGroup
	defer pages.Wait()
	serving, stop := context.WithCancel(context.WithoutCancel(ctx)) // to the very end
	defer stop()
	overlap := cfg.Intercept.Mode != config.InterceptNone
	http, err := listenHTTP(ctx, cfg.HTTP, overlap)
	if err != nil && !overlap {
		return errors.Join(err, d.close())
	}
	pages.Go(func() {
		d.servePages(serving, "http", http, err, false, func() (net.Listener, error) { return listenHTTP(serving, cfg.HTTP, overlap) })
	})
	control, controlErr := listenControl(ctx, cfg.Control)
	pages.Go(func() {
		d.servePages(serving, "control", control, controlErr, true, func() (net.Listener, error) { return listenControl(serving, cfg.Control) })
	})
	if err := d.serve(); err != nil {
		return errors.Join(err, d.close())
	}
	return d.live(ctx, path, load, hup)
}

// live has all parts work until ctx ends, and then leaves in order.
func (d *daemon) live(ctx context.Context, path string, load func() (*config.Config, error), hup <-chan os.Signal) error {
	working, stop := context.WithCancel(ctx)
	defer stop()
	// What has to be so before the daemon is ready, before anything of it is.
	d.conditions.notReady(upstreamHeard, "none has answered yet")
	d.kubeReadiness()
	if d.config().Intercept.Mode != config.InterceptNone {
		d.conditions.notReady("intercept", "not begun yet")
	}
	d.conditions.notReady(starting, "")
	var workers sync.WaitGroup
	changed := make(chan struct{}, 1)
	failed := make(chan error, 1)
	workers.Go(func() { d.probeEndpoints(working) })
	workers.Go(func() { d.awaitUpstream(working) })
	workers.Go(func() { d.watchdog(working) })
	workers.Go(func() { d.keepAccounting(working) })
	d.guarding.Load().run(working)
	var taking *interception
	if cfg := d.config(); cfg.Intercept.Mode != config.InterceptNone {
		taking = newInterception(d, cfg)
		workers.Go(func() { taking.keep(working, startFailure(failed)) })
	}
	if path != "" {
		workers.Go(func() { d.watchConfig(working, path, changed) })
	}
	var err error
	for leaving := false; !leaving; {
		select {
		case <-changed:
			d.reload(working, load)
		case <-hup:
			d.reload(working, load)
		case <-d.serviceChanged:
			if err = d.followService(working); err != nil {
				leaving = true
			}
		case err = <-failed:
			leaving = true
		case <-ctx.Done():
			leaving = true
		}
	}
	d.log.Info("leaving: answering what was received")
	d.conditions.notReady("leaving", "the process was told to end")
	stop()
	workers.Wait()
	if taking != nil {
		err = errors.Join(err, taking.withdraw())
	}
	err = errors.Join(err, d.close())
	if taking != nil {
		err = errors.Join(err, taking.end())
	}
	d.log.Info("left")
	return err
}

// startFailure returns what reports the first try of an interception if an
// operator has to change something: a setting, or who has an address.
func startFailure(failed chan<- error) func(error) {
	return func(err error) {
		var setting *iptables.ConfigError
		var address *iptables.AddressError
		if errors.As(err, &setting) || errors.As(err, &address) {
			failed <- err
		}
	}
}

// watchConfig reports changes of the configuration file until ctx ends.
func (d *daemon) watchConfig(ctx context.Context, path string, changed chan<- struct{}) {
	config.Watch(ctx, path, func(_ []byte, err error) {
		if err != nil {
			d.log.Warn("configuration file not readable", "error", err)
			d.conditions.warn("config file", err.Error())
			return
		}
		d.conditions.warn("config file", "")
		select {
		case changed <- struct{}{}:
		default:
		}
	})
}
