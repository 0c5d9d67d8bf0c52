package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// RSS is a process's resident memory in bytes.
func RSS(pid int) (int64, error) {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0, fmt.Errorf("read resident memory of process %d: %w", pid, err)
	}
	rss, err := parseStatus(string(status))
	if err != nil {
		return 0, fmt.Errorf("read resident memory of process %d: %w", pid, err)
	}
	return rss, nil
}

func parseStatus(status string) (int64, error) {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("VmRSS: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("status has no VmRSS")
}
