package proc

import (
	"os"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	for _, tt := range []struct {
		name, stat string
		want       Times
		fails      bool
	}{
		{
			name: "plain",
			stat: "71 (unbound) S 1 71 71 0 -1 4194560 1 0 0 0 250 1040 3 4 20 0 1 0 100 2 3",
			want: Times{2500 * time.Millisecond, 10400 * time.Millisecond},
		},
		{
			name: "a name with spaces and parentheses",
			stat: "71 (a) b (c) S 1 71 71 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 100 2 3",
			want: Times{10 * time.Millisecond, 20 * time.Millisecond},
		},
		{name: "cut off", stat: "71 (unbound) S 1 71", fails: true},
		{name: "empty", stat: "", fails: true},
		{name: "no number", stat: "71 (x) S 1 71 71 0 -1 4194560 1 0 0 0 x 2 3", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseStat(tt.stat)
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("got %v, %v; want %v, error %v", got, err, tt.want, tt.fails)
			}
		})
	}
}

func TestParseStatus(t *testing.T) {
	for _, tt := range []struct {
		name, status string
		want         int64
		fails        bool
	}{
		{name: "plain", status: "Name:\tx\nVmHWM:\t  9000 kB\nVmRSS:\t    6416 kB\n", want: 6416 << 10},
		{name: "kernel thread", status: "Name:\tkthreadd\n", fails: true},
		{name: "no number", status: "VmRSS:\t kB\n", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseStatus(tt.status)
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("got %v, %v; want %v, error %v", got, err, tt.want, tt.fails)
			}
		})
	}
}

func TestThisProcess(t *testing.T) {
	before, err := CPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for spent := (Times{}); spent.Total() < 2*tick; {
		after, err := CPU(os.Getpid(), os.Getpid()) // which costs time itself
		if err != nil {
			t.Fatal(err)
		}
		spent = after.Sub(before)
	}
	if got, err := RSS(os.Getpid()); err != nil || got < 1<<20 {
		t.Errorf("RSS = %d, %v", got, err)
	}
}
