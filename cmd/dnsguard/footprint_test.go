package main

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
)

// footprint is what a process holds.
type footprint struct {
	goroutines, descriptors int
	heap                    int // octets that live
}

func (f footprint) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors, %.1f MiB of heap", f.goroutines, f.descriptors, mib(int64(f.heap)))
}

// footprint asks the daemon over its control socket, and the kernel.
func (d *guardd) footprint() (f footprint) {
	d.t.Helper()
	number := func(page, pattern string) int {
		m := regexp.MustCompile(pattern).FindStringSubmatch(d.page(page))
		if m == nil {
			return 1 << 30 // it is busy: look again
		}
		n, _ := strconv.Atoi(m[1]) // digits
		return n
	}
	f.heap = number("/debug/pprof/heap?gc=1&debug=1", `# HeapAlloc = (\d+)`)
	f.goroutines = number("/debug/pprof/goroutine?debug=1", `goroutine profile: total (\d+)`)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.proc.Pid()))
	if err != nil {
		d.t.Fatal(err)
	}
	f.descriptors = len(fds)
	return f
}

// What a footprint may grow by without a leak: sockets to upstreams, and their
// goroutines, come and go; buffers are kept for the next burst.
const (
	moreGoroutines  = 40
	moreDescriptors = 20
	moreHeap        = 8 << 20
)

// settles waits until the daemon holds no more than before.
func (d *guardd) settles(t *testing.T, before footprint) {
	t.Helper()
	var now footprint
	defer func() { t.Logf("before: %v; after: %v", before, now) }()
	await(t, "a footprint as before", func() bool {
		now = d.footprint()
		return now.goroutines <= before.goroutines+moreGoroutines &&
			now.descriptors <= before.descriptors+moreDescriptors &&
			now.heap <= before.heap+moreHeap
	})
}
