// Command run measures dnsguard beside its peers on this machine.
//
// It joins two network namespaces with a veth pair: the server alone on CPU 0, the
// load generator and the stand-in upstream on CPU 1. Servers take turns, round by
// round, so that whatever drifts drifts for all of them; every figure is the median
// of the rounds, with the least and the greatest beside it. Servers that are not
// installed are left out. It writes results.json, results.md and results.svg.
//
//	make bench                                     # final figures: a quiet machine, about half an hour
//	make bench BENCHFLAGS='-rounds 1 -duration 2s' # does it work
//	run -from bench/results/results.json           # only write the table and the plot again
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	rounds := flag.Int("rounds", 5, "rounds; at least 5 for figures to publish")
	duration := flag.Duration("duration", 5*time.Second, "of each measurement")
	only := flag.String("servers", "", "comma-separated `names`; empty means all that are installed")
	out := flag.String("out", "bench/results", "`directory` for the results")
	from := flag.String("from", "", "results.json `file` to write the table and the plot from, measuring nothing")
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the load generator: %w", err)
	}
	tools := filepath.Dir(self)
	paths := map[string]string{
		"echo":     filepath.Join(tools, "echo"),
		"coredns":  filepath.Join(tools, "coredns"),
		"dnsguard": "bin/dnsguard",
	}
	flag.Func("path", "`name=file`: a server's program, if not on $PATH (repeat)", func(s string) error {
		name, file, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want name=file")
		}
		paths[name] = file
		return nil
	})
	flag.Parse()
	if flag.NArg() > 0 || *rounds < 1 || *duration <= 0 {
		flag.Usage()
		return errors.New("bad arguments")
	}

	var r *results
	if *from != "" {
		r, err = readResults(*from)
	} else {
		var chosen []installed
		if chosen, err = choose(ctx, *only, paths); err == nil {
			r, err = measureAll(ctx, tools, chosen, *rounds, *duration)
		}
	}
	if err != nil {
		return err
	}
	return r.write(*out)
}

// measureAll runs every round and prints each figure as it comes.
func measureAll(ctx context.Context, tools string, servers []installed, rounds int, duration time.Duration) (*results, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("must run as root: it makes network namespaces")
	}
	n, err := newNetwork()
	if err != nil {
		return nil, err
	}
	defer func() { _ = n.close() }()

	b := &bench{network: n, tools: tools, duration: duration}
	if err := b.startUpstream(ctx); err != nil {
		return nil, err
	}
	r, err := newResults(servers, rounds, duration)
	if err != nil {
		return nil, err
	}
	for round := range rounds {
		for _, s := range servers {
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", round+1, rounds, s.name)
			sample, err := b.round(ctx, s)
			if err != nil {
				return nil, fmt.Errorf("round %d, %s: %w", round+1, s.name, err)
			}
			r.add(s.name, sample)
		}
	}
	return r, nil
}
