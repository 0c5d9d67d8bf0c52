// Command load is a DNS load generator that costs little more than the kernel's own
// UDP path, so that what it measures is the server.
//
// It asks over UDP from one thread, in batches. Closed loop (-window): so many
// queries are always in flight, for the highest rate. Open loop (-rate): so many
// queries a second, each with its latency counted from the time at which it was
// scheduled, so that a stalled server cannot hide its stalls. An answer counts only
// if it carries the id and the exact question of a query in flight.
//
//	load -server 10.99.0.1:53 -window 100 -names 'host-########.names.bench.example' -n 1000
//	load -server 10.99.0.1:53 -rate 5000 -busy -pid 4711 -json
package main

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/bench/internal/proc"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run() error {
	server := flag.String("server", "127.0.0.1:5353", "`address:port` to ask")
	local := flag.String("local", "", "source `address`; empty lets the kernel choose")
	ports := flag.Int("ports", 4, "source ports")
	window := flag.Int("window", 100, "closed loop: queries in flight")
	rate := flag.Float64("rate", 0, "open loop: queries a second; 0 means closed loop")
	duration := flag.Duration("duration", 10*time.Second, "how long to measure")
	warmup := flag.Duration("warmup", time.Second, "how long to ask the same way before that")
	timeout := flag.Duration("timeout", time.Second, "when a query counts as lost")
	pattern := flag.String("names", "host-########.names.bench.example", "a name with # for digits, or @FILE with lines `name [type]`")
	count := flag.Uint64("n", 1000, "distinct names of the pattern; 0: never the same one twice")
	first := flag.Uint64("first", 0, "number of the first name with -n 0")
	qtype := flag.String("type", "A", "query type")
	edns := flag.Bool("edns", false, "send an OPT record, size 1232")
	once := flag.Bool("once", false, "only ask each name once, to fill a cache, and report that")
	busy := flag.Bool("busy", false, "never sleep: no wake-up in the measured latency")
	pids := flag.String("pid", "", "server's process `ids`, comma-separated, for CPU per query")
	asJSON := flag.Bool("json", false, "write the result as JSON")
	flag.Parse()

	o := options{
		sourcePorts: *ports, window: *window, rate: *rate, timeout: *timeout, busy: *busy,
	}
	if flag.NArg() > 0 || o.sourcePorts < 1 || o.window < 1 || o.rate < 0 || o.timeout <= 0 || *duration <= 0 {
		flag.Usage()
		return fmt.Errorf("bad arguments")
	}
	var err error
	if o.server, err = netip.ParseAddrPort(*server); err != nil {
		return fmt.Errorf("-server: %w", err)
	}
	if *local != "" {
		if o.local, err = netip.ParseAddr(*local); err != nil {
			return fmt.Errorf("-local: %w", err)
		}
	}
	if *edns {
		o.tail = []byte{0, 0, 41, 1232 >> 8, 1232 & 0xff, 0, 0, 0, 0, 0, 0}
	}
	watched, err := parsePIDs(*pids)
	if err != nil {
		return err
	}
	var ns names
	if path, ok := strings.CutPrefix(*pattern, "@"); ok {
		ns, err = readList(path, *qtype)
	} else {
		ns, err = newPattern(*pattern, *qtype, *count, *first)
	}
	if err != nil {
		return err
	}

	// One thread, nothing allocated while it measures: neither the collector nor the
	// scheduler has anything to do.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	g, err := newGenerator(o, ns)
	if err != nil {
		return err
	}
	defer g.close()

	var r *result
	if *once {
		if ns.count() == 0 {
			return fmt.Errorf("-once wants a finite set of names")
		}
		r, err = measure(g, time.Hour, uint64(ns.count()), watched)
	} else {
		ns.shuffle()
		if *warmup > 0 {
			g.run(*warmup, 0, nil)
		}
		r, err = measure(g, *duration, 0, watched)
	}
	if err != nil {
		return err
	}
	if *asJSON {
		return r.writeJSON(os.Stdout)
	}
	return r.writeText(os.Stdout)
}

// measure runs g once and sets its result beside the CPU time that passed.
func measure(g *generator, duration time.Duration, n uint64, pids []int) (*result, error) {
	before, err := proc.CPU(pids...)
	if err != nil {
		return nil, err
	}
	ownBefore, err := proc.CPU(os.Getpid())
	if err != nil {
		return nil, err
	}
	var after, own proc.Times
	r := g.run(duration, n, func() {
		if after, err = proc.CPU(pids...); err == nil {
			own, err = proc.CPU(os.Getpid())
		}
	})
	if err != nil {
		return nil, err
	}
	r.Server = g.server.String()
	r.Ports = g.sourcePorts
	r.Loop = "window " + strconv.Itoa(g.window)
	if g.rate > 0 {
		r.Loop = "rate " + strconv.FormatFloat(g.rate, 'f', -1, 64)
	}
	var server *proc.Times
	if len(pids) > 0 {
		spent := after.Sub(before)
		server = &spent
	}
	r.finish(server, own.Sub(ownBefore))
	return r, nil
}

func parsePIDs(s string) ([]int, error) {
	if s == "" {
		return nil, nil
	}
	var pids []int
	for field := range strings.SplitSeq(s, ",") {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("-pid: %w", err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
