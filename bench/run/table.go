package main

import (
	"fmt"
	"strconv"
	"strings"
)

// column is one metric in a table.
type column struct {
	title  string
	metric metric
	unit   float64 // values are divided by it
	digits int
}

// markdown is the report: for every table the medians, each with its spread.
func (r *results) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, `# Measured beside its peers

%s; kernel %s; %s; %s. %d rounds, %s per measurement, servers taking turns; load average at
the start %s. Cells are the median of the rounds (least – greatest).

Two namespaces joined by a veth pair, no rules, no connection tracking; the server alone on
CPU 0, generator and stand-in upstream on CPU 1. Queries of 51 bytes for A without EDNS,
answers of 67; every server is a forwarder on one thread with room for all names. Trust
ratios within this page; absolute figures change with the machine and the day.

![CPU per query and memory per entry](results.svg)
`, r.Date, r.Kernel, r.CPU, r.Go, r.Rounds, r.Duration, r.Load)

	if !r.quiet() {
		b.WriteString("\n**The machine was busy with other things: these figures are provisional.**\n")
	}
	r.table(&b, "Hits at saturation", "1,000 names, 100 queries in flight on 4 source ports. CPU is the server's, user and system, per answer.", []column{
		{"queries/s", hitQPS, 1, 0}, {"CPU µs/query", hitCPU, 1, 2}, {"lost", lost, 1, 0},
	})
	r.table(&b, "Hits at a fixed rate", "Open loop, latency from the scheduled time, the client never sleeping.", []column{
		{"1,000/s: CPU µs", cpu1k, 1, 1},
		{"p50 µs", p50At1k, 1, 0},
		{"p99 µs", p99At1k, 1, 0},
		{"p99.9 µs", p999At1k, 1, 0},
		{"5,000/s: CPU µs", cpu5k, 1, 1},
		{"p50 µs", p50At5k, 1, 0},
		{"p99 µs", p99At5k, 1, 0},
		{"p99.9 µs", p999At5k, 1, 0},
	})
	r.table(&b, "Misses", "No name twice, 100 in flight. The stand-in upstream answers at once, on the generator's CPU.", []column{
		{"queries/s", missQPS, 1, 0}, {"CPU µs/query", missCPU, 1, 2}, {"lost", missLost, 1, 0},
	})
	r.table(&b, "Memory and size", "Resident memory; bytes per entry between 10,000 and 100,000 names (dnsmasq takes all of its 200,000 at the start). Start is from exec to the first forwarded answer. The program file alone, without its shared libraries.", []column{
		{"empty MiB", rssEmpty, 1 << 20, 1},
		{"10k MiB", rssFew, 1 << 20, 1},
		{"100k MiB", rssMany, 1 << 20, 1},
		{"bytes/entry", bytesPerEntry, 1, 0},
		{"start ms", startup, 1, 1},
		{"program MB", binarySize, 1e6, 1},
	})

	b.WriteString("\n## Versions\n\n")
	for _, s := range r.Servers {
		if s.Version != "" {
			fmt.Fprintf(&b, "* %s: %s\n", s.Name, s.Version)
		}
	}
	return b.String()
}

func (r *results) table(b *strings.Builder, title, about string, columns []column) {
	fmt.Fprintf(b, "\n## %s\n\n%s\n\n| server |", title, about)
	for _, c := range columns {
		fmt.Fprintf(b, " %s |", c.title)
	}
	b.WriteString("\n|---|" + strings.Repeat("---:|", len(columns)) + "\n")
	for _, s := range r.Servers {
		fmt.Fprintf(b, "| %s |", s.Name)
		for _, c := range columns {
			fmt.Fprintf(b, " %s |", s.cell(c))
		}
		b.WriteString("\n")
	}
}

func (s *serverResults) cell(c column) string {
	f, ok := s.figure(c.metric)
	if !ok {
		return "–"
	}
	median := thousands(f.median/c.unit, c.digits)
	least, greatest := thousands(f.least/c.unit, c.digits), thousands(f.greatest/c.unit, c.digits)
	if least == greatest {
		return median
	}
	return fmt.Sprintf("%s (%s – %s)", median, least, greatest)
}

// thousands formats v with commas between groups of three digits.
func thousands(v float64, digits int) string {
	s := strconv.FormatFloat(v, 'f', digits, 64)
	whole, fraction, _ := strings.Cut(s, ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return sign + whole
}
