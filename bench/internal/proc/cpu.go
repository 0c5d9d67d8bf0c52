package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Times is CPU time, all threads of a process together.
type Times struct{ User, System time.Duration }

// Sub is what was used between o and t.
func (t Times) Sub(o Times) Times { return Times{t.User - o.User, t.System - o.System} }

// Total is user and system time together.
func (t Times) Total() time.Duration { return t.User + t.System }

// tick is the unit of /proc/PID/stat: USER_HZ is 100 on every Linux that Go runs on.
const tick = 10 * time.Millisecond

// CPU adds up the CPU time of processes, to a hundredth of a second each.
func CPU(pids ...int) (Times, error) {
	var sum Times
	for _, pid := range pids {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			return Times{}, fmt.Errorf("read CPU time of process %d: %w", pid, err)
		}
		t, err := parseStat(string(stat))
		if err != nil {
			return Times{}, fmt.Errorf("read CPU time of process %d: %w", pid, err)
		}
		sum.User += t.User
		sum.System += t.System
	}
	return sum, nil
}

func parseStat(stat string) (Times, error) {
	// Field 2, the command's name, is in parentheses and may contain anything.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return Times{}, fmt.Errorf("stat has %d fields after the command's name", len(fields))
	}
	user, err := strconv.ParseInt(fields[utime], 10, 64)
	if err != nil {
		return Times{}, fmt.Errorf("utime: %w", err)
	}
	system, err := strconv.ParseInt(fields[stime], 10, 64)
	if err != nil {
		return Times{}, fmt.Errorf("stime: %w", err)
	}
	return Times{time.Duration(user) * tick, time.Duration(system) * tick}, nil
}
