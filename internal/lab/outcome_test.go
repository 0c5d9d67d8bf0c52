package lab

import (
	"errors"
	"testing"
	"time"
)

// script makes a timeline with one query a second: '.' answered after 100 ms,
// 'x' given up after 2 s.
func script(marks string) Timeline {
	start := time.Unix(1000, 0)
	var t Timeline
	for i, m := range marks {
		o := Outcome{Seq: i, Sent: start.Add(time.Duration(i) * time.Second), Took: 100 * time.Millisecond}
		if m == 'x' {
			o.Took, o.Err = 2*time.Second, ErrTimeout
		}
		t = append(t, o)
	}
	return t
}

func TestTimeline(t *testing.T) {
	cases := []struct {
		name, marks string
		failed      int
		outage      time.Duration
		over        bool
	}{
		{"empty", "", 0, 0, true},
		{"all answered", "....", 0, 0, true},
		{"one lost", "..x..", 1, 1100 * time.Millisecond, true},
		{"first lost", "x...", 1, 1100 * time.Millisecond, true},
		{"the longer of two", ".x.xxx..", 4, 3100 * time.Millisecond, true},
		{"last lost", "...x", 1, 2 * time.Second, false},
		{"until the end", "..xxxx", 4, 5 * time.Second, false},
		{"a long one, over, and a short one, not", ".xxxx.x", 5, 4100 * time.Millisecond, true},
		{"all lost", "xx", 2, 3 * time.Second, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			timeline := script(c.marks)
			if got := timeline.Failed(); got != c.failed {
				t.Errorf("failed %d, want %d", got, c.failed)
			}
			if got := timeline.Answered(); got != len(c.marks)-c.failed {
				t.Errorf("answered %d, want %d", got, len(c.marks)-c.failed)
			}
			if got, over := timeline.LongestOutage(); got != c.outage || over != c.over {
				t.Errorf("longest outage %v (over: %v), want %v (%v)", got, over, c.outage, c.over)
			}
			if got := timeline.Slowest(); timeline.Answered() > 0 && got != 100*time.Millisecond {
				t.Errorf("slowest answer %v", got)
			}
		})
	}
}

func TestRcodeError(t *testing.T) {
	for code, want := range map[int]string{2: "answered SERVFAIL", 3: "answered NXDOMAIN", 4000: "answered RCODE 4000"} {
		if got := RcodeError(code).Error(); got != want {
			t.Errorf("%d: %q, want %q", code, got, want)
		}
	}
	if errors.Is(RcodeError(2), RcodeError(3)) {
		t.Error("different codes are the same error")
	}
}
