package iptables

import (
	"errors"
	"testing"

	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

func TestNextSlot(t *testing.T) {
	for name, tc := range map[string]struct {
		held []int
		want int // negative: an error
	}{
		"the first":           {nil, 0},
		"after one":           {[]int{0}, 1},
		"after the newest":    {[]int{0, 1}, 2},
		"the oldest has gone": {[]int{1}, 2},
		"a gap":               {[]int{0, 2}, 3},
		"round the end":       {[]int{7}, 0},
		"across the end":      {[]int{7, 0}, 1},
		"a gap across":        {[]int{6, 0}, 1},
		"all":                 {[]int{0, 1, 2, 3, 4, 5, 6, 7}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			held := make(map[int]bool)
			for _, n := range tc.held {
				held[n] = true
			}
			got, err := nextSlot(func(n int) (bool, error) { return held[n], nil })
			if (err != nil) != (tc.want < 0) || err == nil && got != tc.want {
				t.Errorf("next of %v: %d, %v; want %d", tc.held, got, err, tc.want)
			}
		})
	}
	broken := errors.New("broken")
	if _, err := nextSlot(func(int) (bool, error) { return false, broken }); !errors.Is(err, broken) {
		t.Errorf("error is lost: %v", err)
	}
}

// TestSlots overlaps processes as upgrades do.
func TestSlots(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	in(t, ns, func() error {
		first, err := claimSlot(DefaultMark)
		if err != nil {
			return err
		}
		if first.number != 0 || !first.alone() || !first.newest() {
			t.Errorf("first: %+v", first)
		}
		for want := 1; want < 3*slots; want++ {
			second, err := claimSlot(DefaultMark)
			if err != nil {
				return err
			}
			if second.number != want%slots {
				t.Errorf("slot %d, want %d", second.number, want%slots)
			}
			if first.alone() || first.newest() || second.alone() || !second.newest() {
				t.Errorf("while both live: first %v %v, second %v %v", first.alone(), first.newest(), second.alone(), second.newest())
			}
			if err := first.release(); err != nil {
				return err
			}
			if !second.alone() || !second.newest() {
				t.Errorf("after the first: %v %v", second.alone(), second.newest())
			}
			first = second
		}
		return first.release()
	})
}

// TestOtherMark: processes with one mark overlap, those with two do not.
func TestOtherMark(t *testing.T) {
	ns := labtest.NewNamespace(t, "node")
	in(t, ns, func() error {
		ask := func(when string, mark uint32, want bool) {
			t.Helper()
			if got, err := OtherMark(mark); got != want || err != nil {
				t.Errorf("%s, mark %#x: %v, %v", when, mark, got, err)
			}
		}
		ask("alone", 0, false)
		first, err := claimSlot(DefaultMark)
		if err != nil {
			return err
		}
		ask("beside the default", 0, false)
		ask("beside the default", DefaultMark, false)
		ask("beside the default", 0x300, true)
		ask("beside the default", 0x50, true) // the bit of packets taken is the same
		second, err := claimSlot(DefaultMark)
		if err != nil {
			return err
		}
		if err := first.release(); err != nil {
			return err
		}
		ask("beside the second", DefaultMark, false)
		ask("beside the second", 0x300, true)
		if err := second.release(); err != nil {
			return err
		}
		ask("after both", 0x300, false)
		return nil
	})
}
