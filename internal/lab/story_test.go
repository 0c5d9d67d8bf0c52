package lab

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		s := &story{out: &out}
		s.say("before")
		s.chapter("One")
		time.Sleep(3150 * time.Millisecond)
		s.at(bad, "dns-a", "is %s", "gone")
		time.Sleep(9 * time.Second)
		s.at(plain, "", "later")
		s.colour = true
		s.at(good, "x", "green")
		s.colour = false
		s.table([]string{"left", "right"}, [][]string{{"row", "1", "2"}})
		want := "  before\n" +
			"\nOne\n" +
			"  t=+3.1 s  dns-a       is gone\n" +
			"  t=+12.2 s             later\n" +
			"  \x1b[32mt=+12.2 s x           green\x1b[0m\n" +
			"                                                    left               right\n" +
			"  --------------------------------------------------------------------------\n" +
			"  row                                                  1                   2\n"
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

func TestTally(t *testing.T) {
	var c tally
	observe := c.observe(&c.pinned)
	for _, err := range []error{nil, ErrTimeout, nil} {
		observe(Outcome{Err: err})
	}
	pinned, fresh := c.take()
	if got := pinned.String(); got != "2 answered, 1 timed out" {
		t.Errorf("pinned: %s", got)
	}
	if got := fresh.String(); got != "waiting" {
		t.Errorf("fresh: %s", got)
	}
	if pinned, _ = c.take(); pinned != (score{}) {
		t.Errorf("taken twice: %v", pinned)
	}
}

// The scenario does not end well unless all acts went as it tells.
func TestJudge(t *testing.T) {
	cases := []struct {
		name                                     string
		withoutPinned, guarded, pinned, newPorts string
		ok                                       bool
	}{
		{"as told", "..xxx", "..x..", ".....", ".....", true},
		{"no outage", ".....", "..x..", ".....", ".....", false},
		{"an outage that ended", ".xx..", "..x..", ".....", ".....", false},
		{"not healed", "..xxx", "...xx", ".....", ".....", false},
		{"healed late", "..xxx", ".xxxxxx.", ".....", ".....", false},
		{"nothing asked with the guard", "..xxx", "", ".....", ".....", false},
		{"pinned query lost", "..xxx", "..x..", "..x..", ".....", false},
		{"other query lost", "..xxx", "..x..", ".....", "....x", false},
		{"no query at all", "..xxx", "..x..", "", "", false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := judge([]*act{
				{pinned: script(c.withoutPinned)},
				{pinned: script(c.guarded)},
				{pinned: script(c.pinned), fresh: script(c.newPorts)},
			})
			if (err == nil) != c.ok {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTailWriter(t *testing.T) {
	w := &tailWriter{limit: 10}
	for _, part := range []string{"first\n", "second\n", "third\n"} {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	if got := w.String(); got != "third\n" {
		t.Errorf("kept %q", got)
	}
	w = &tailWriter{limit: 100}
	if _, err := w.Write([]byte("all\nof it")); err != nil || w.String() != "all\nof it" {
		t.Errorf("kept %q, %v", w, err)
	}
}
