package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/config"
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
	log, level := newLogger(c.err, cfg.Log)
	log.Info("starting", "version", version, "config", path, "hash", cfg.Hash())
	d, err := newDaemon(ctx, cfg, log, level)
	if err != nil {
		return err
	}
	http, err := listenHTTP(ctx, cfg.HTTP)
	if err != nil {
		return errors.Join(err, d.close())
	}
	control, err := listenControl(ctx, cfg.Control)
	if err != nil {
		// Queries are answered without it; only dnsguard health and its
		// like have nobody to ask.
		log.Warn("no control socket", "error", err)
		d.conditions.warn("control", err.Error())
	}
	stopHTTP, stopControl := d.serveHTTP(http, false), d.serveHTTP(control, true)
	defer stopControl()
	defer stopHTTP()
	if err := d.serve(); err != nil {
		return errors.Join(err, d.close())
	}

	hup := make(chan os.Signal, 1)
	signal.Notify(hup, unix.SIGHUP)
	defer signal.Stop(hup)
	working, stop := context.WithCancel(ctx)
	defer stop()
	changed := make(chan struct{}, 1)
	var workers sync.WaitGroup
	workers.Go(func() { d.probeEndpoints(working) })
	workers.Go(func() { d.awaitUpstream(working) })
	if path != "" {
		workers.Go(func() {
			config.Watch(working, path, func(_ []byte, err error) {
				if err != nil {
					err = fmt.Errorf("watch configuration: %w", err)
					log.Warn("configuration file not readable", "error", err)
					d.conditions.warn("config file", err.Error())
					return
				}
				d.conditions.warn("config file", "")
				select {
				case changed <- struct{}{}:
				default:
				}
			})
		})
	}
	for {
		select {
		case <-changed:
			d.reload(ctx, load)
		case <-hup:
			d.reload(ctx, load)
		case <-ctx.Done():
			log.Info("leaving: answering what was received")
			d.conditions.notReady("leaving", "the process was told to end")
			stop()
			err := d.close()
			workers.Wait()
			log.Info("left")
			return err
		}
	}
}
