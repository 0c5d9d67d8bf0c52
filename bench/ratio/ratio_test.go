//go:build !race

package ratio

import (
	"bufio"
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

var update = flag.Bool("update", false, "write what is measured to baseline.txt")

const (
	baselineFile = "baseline.txt"

	// limit is how many times its baseline a ratio may be. Below 2, with room for other
	// kinds of processors; on one machine, ratios stay within a tenth.
	limit = 1.8

	// A slice is much shorter than a time slice of the scheduler's, so that some are not
	// interrupted on the busiest machine; the least of so many is the work alone.
	slice  = 250 * time.Microsecond
	rounds = 200

	// processes is how often a benchmark of another package is started.
	processes = 2
)

// TestRatios compares each workload's time, in units of the calibration's, with the
// baseline. What is too slow is measured once more.
func TestRatios(t *testing.T) {
	all := workloads(t)
	if *update {
		write(t, all)
	}
	got, want := measure(t, all), read(t)
	var slow []workload
	for _, w := range all {
		base, ok := want[w.name]
		switch {
		case !ok:
			t.Errorf("%s is not in %s: go test ./bench/ratio -update", w.name, baselineFile)
		case got[w.name] > limit*base:
			slow = append(slow, w)
		}
	}
	for name, again := range measure(t, slow) {
		t.Logf("%s was %.2f, measured again: %.2f", name, got[name], again)
		got[name] = min(got[name], again)
	}
	for name := range want {
		if got[name] == 0 {
			t.Errorf("%s of %s is not measured any more: go test ./bench/ratio -update", name, baselineFile)
		}
	}
	for name, base := range want {
		if got[name] > limit*base {
			t.Errorf("%s takes %.2f times as long as the baseline says, more than %.2f", name, got[name]/base, limit)
		}
	}
	t.Log("\n" + table(got, want))
}

// TestSlower: what takes longer than the limit is found out. Work that is done again at
// once takes some 0.6 times as long as at first: all is at hand. Hence three times.
func TestSlower(t *testing.T) {
	fast, slow := calibration(), calibration()
	got := measure(t, []workload{
		{name: "fast", run: fast.run},
		{name: "slow", run: func(n int) {
			for range 3 {
				slow.run(n)
			}
		}},
	})
	if got["slow"] <= limit*got["fast"] {
		t.Errorf("ratios %v, not more than %.2f apart", got, limit)
	}
}

// measure returns the ratios: the least time of a slice of each workload, over that of
// the calibration's, which take turns.
func measure(t *testing.T, all []workload) map[string]float64 {
	t.Helper()
	if len(all) == 0 {
		return nil
	}
	// What the collector costs depends on the heap of everything else here.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	all = append([]workload{calibration()}, all...)
	times := make([]int, len(all)) // how often makes a slice
	for i, w := range all {
		if w.bench == nil {
			times[i] = fit(w)
		}
	}
	least := make([]float64, len(all)) // ns for one
	for round := range rounds {
		for i, w := range all {
			var each float64
			switch {
			case w.bench == nil:
				w.run(times[i]/4 + 1) // what others have put out of the caches comes back
				began := time.Now()
				w.run(times[i])
				each = float64(time.Since(began)) / float64(times[i])
			case round%(rounds/processes) == 0:
				each = w.bench.least(t)
			default:
				continue
			}
			if least[i] == 0 || each < least[i] {
				least[i] = each
			}
		}
	}
	ratios := make(map[string]float64)
	for i, w := range all[1:] {
		ratios[w.name] = least[i+1] / least[0]
	}
	return ratios
}

// fit finds how often a workload fits in a slice.
func fit(w workload) int {
	for n := 1; ; n *= 2 {
		began := time.Now()
		w.run(n)
		// More than a slice once may be an interruption.
		if took := time.Since(began); took > slice/2 {
			began = time.Now()
			w.run(n)
			if took = min(took, time.Since(began)); took > slice/2 {
				return n
			}
		}
	}
}

func table(got, want map[string]float64) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "workload\tratio\tbaseline\ttimes\t\n")
	for _, name := range slices.Sorted(maps.Keys(got)) {
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.2f\t\n", name, got[name], want[name], got[name]/cmp.Or(want[name], got[name]))
	}
	_ = w.Flush()
	return b.String()
}

// read reads the baseline: a name and a ratio on each line.
func read(t *testing.T) map[string]float64 {
	t.Helper()
	f, err := os.Open(baselineFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make(map[string]float64)
	for s := bufio.NewScanner(f); s.Scan(); {
		if strings.HasPrefix(s.Text(), "#") {
			continue
		}
		var name string
		var ratio float64
		if _, err := fmt.Sscan(s.Text(), &name, &ratio); err != nil || ratio <= 0 {
			t.Fatalf("%s: %q: %v", baselineFile, s.Text(), err)
		}
		want[name] = ratio
	}
	return want
}

// write writes a new baseline, of the medians of some measurements.
func write(t *testing.T, all []workload) {
	t.Helper()
	each := make(map[string][]float64)
	for range 5 {
		for name, ratio := range measure(t, all) {
			each[name] = append(each[name], ratio)
		}
	}
	b := []byte("# Time of each workload in units of the calibration's: go test ./bench/ratio -update\n")
	for _, name := range slices.Sorted(maps.Keys(each)) {
		slices.Sort(each[name])
		b = fmt.Appendf(b, "%s %.2f\n", name, each[name][len(each[name])/2])
	}
	if err := os.WriteFile(baselineFile, b, 0o644); err != nil {
		t.Fatal(err)
	}
}
