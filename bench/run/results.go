package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// metric names one figure of a round.
type metric string

const (
	hitQPS  metric = "hit_qps"
	hitCPU  metric = "hit_cpu_us"
	missQPS metric = "miss_qps"
	missCPU metric = "miss_cpu_us"

	cpu1k    metric = "cpu_us_at_1000"
	p50At1k  metric = "p50_us_at_1000"
	p99At1k  metric = "p99_us_at_1000"
	p999At1k metric = "p999_us_at_1000"
	cpu5k    metric = "cpu_us_at_5000"
	p50At5k  metric = "p50_us_at_5000"
	p99At5k  metric = "p99_us_at_5000"
	p999At5k metric = "p999_us_at_5000"

	lost     metric = "hits_lost"
	missLost metric = "misses_lost"

	rssEmpty      metric = "rss_empty_bytes"
	rssFew        metric = "rss_10k_bytes"
	rssMany       metric = "rss_100k_bytes"
	bytesPerEntry metric = "bytes_per_entry"
	startup       metric = "startup_ms"
	binarySize    metric = "binary_bytes"
)

// results is everything that was measured and on what.
type results struct {
	Date     string          `json:"date"`
	Kernel   string          `json:"kernel"`
	CPU      string          `json:"cpu"`
	Go       string          `json:"go"`
	Load     string          `json:"load_average_at_start"`
	Rounds   int             `json:"rounds"`
	Duration string          `json:"duration"`
	Servers  []serverResults `json:"servers"`
}

type serverResults struct {
	Name    string               `json:"name"`
	Version string               `json:"version,omitempty"`
	Values  map[metric][]float64 `json:"values"` // one per round
}

func newResults(servers []installed, rounds int, duration time.Duration) (*results, error) {
	var uname unix.Utsname
	if err := unix.Uname(&uname); err != nil {
		return nil, fmt.Errorf("read the kernel's version: %w", err)
	}
	cpu, err := cpuModel()
	if err != nil {
		return nil, err
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return nil, fmt.Errorf("read the load average: %w", err)
	}
	r := &results{
		Date:     time.Now().UTC().Format(time.DateOnly),
		Kernel:   unix.ByteSliceToString(uname.Release[:]),
		CPU:      fmt.Sprintf("%s, %d CPUs", cpu, runtime.NumCPU()),
		Go:       runtime.Version(),
		Load:     strings.Join(strings.Fields(string(load))[:3], " "),
		Rounds:   rounds,
		Duration: duration.String(),
	}
	for _, s := range servers {
		r.Servers = append(r.Servers, serverResults{Name: s.name, Version: s.versionLine, Values: map[metric][]float64{}})
	}
	return r, nil
}

func cpuModel() (string, error) {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", fmt.Errorf("read the processor's model: %w", err)
	}
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value), nil
		}
	}
	return runtime.GOARCH, nil
}

func readResults(path string) (*results, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	r := &results{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("read results %s: %w", path, err)
	}
	return r, nil
}

// add keeps one round of a server.
func (r *results) add(name string, s sample) {
	i := slices.IndexFunc(r.Servers, func(s serverResults) bool { return s.Name == name })
	for m, v := range s {
		r.Servers[i].Values[m] = append(r.Servers[i].Values[m], v)
	}
}

// write makes results.json, results.md and results.svg in dir.
func (r *results) write(dir string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	put := func(name, text string) error {
		return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
	}
	return errors.Join(
		put("results.json", string(text)+"\n"),
		put("results.md", r.markdown()),
		put("results.svg", r.plot()),
	)
}

// quiet says that nothing much ran on the machine before the first round.
func (r *results) quiet() bool {
	const much = 0.5
	minute, _, _ := strings.Cut(r.Load, " ")
	load, err := strconv.ParseFloat(minute, 64)
	return err == nil && load < much
}

// figure is a metric over the rounds.
type figure struct{ median, least, greatest float64 }

// figure sums up a metric; ok is false where it was not measured.
func (s *serverResults) figure(m metric) (f figure, ok bool) {
	v := slices.Sorted(slices.Values(s.Values[m]))
	if len(v) == 0 {
		return figure{}, false
	}
	mid := len(v) / 2
	f = figure{median: v[mid], least: v[0], greatest: v[len(v)-1]}
	if len(v)%2 == 0 {
		f.median = (v[mid-1] + v[mid]) / 2
	}
	return f, true
}
