package lab_test

import (
	"bytes"
	"context"
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// The scenarios in which something happens to the daemon under load: RunDemo
// returns nil only if what they tell has happened.
func TestFailover(t *testing.T) {
	labtest.Require(t)
	labtest.RequireSpeed(t)
	exe := buildDaemon(t)
	for _, c := range []struct {
		scenario string
		want     []string
	}{
		{"kill", []string{
			`dnsguard +killed`,
			`reached dnsguard: +\d{1,2} +reached the DNS pods: +\d{3,}\n`,
			`asked 14000 times, was answered 1[34]\d{3} times: \d+ lost; longest time without an answer \d+ ms`,
		}},
		{"hang", []string{
			`dnsguard +stopped`,
			`reached dnsguard: +\d{1,2} +reached the DNS pods: +\d{3,}\n`,
			`dnsguard +goes on`,
			`asked 16000 times, was answered 1\d{4} times: \d+ lost; longest time without an answer 1?\d{3} ms`,
		}},
		{"upgrade", []string{
			`the old one +is told to end`,
			`the old one +has ended`,
			`asked 12000 times, was answered 12000 times: 0 lost; longest time without an answer 0 ms`,
		}},
	} {
		t.Run(c.scenario, func(t *testing.T) {
			labtest.CheckLeaks(t)
			var out bytes.Buffer
			start := time.Now()
			err := lab.RunDemo(t.Context(), &out, exe, c.scenario)
			t.Logf("%v\n%s", time.Since(start), &out)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range c.want {
				if !regexp.MustCompile(want).Match(out.Bytes()) {
					t.Errorf("the story lacks %q", want)
				}
			}
		})
	}
	// Ctrl-C while the load runs and the daemon stands still.
	t.Run("interrupted", func(t *testing.T) {
		labtest.CheckLeaks(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		out := &interrupter{text: "stopped", cancel: cancel}
		if err := lab.RunDemo(ctx, out, exe, "hang"); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v\n%s", err, &out.Buffer)
		}
	})
}
