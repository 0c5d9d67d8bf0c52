package lab_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// buildDaemon builds the real program.
func buildDaemon(t *testing.T) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "dnsguard")
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", exe, "github.com/dnsguard/dnsguard/cmd/dnsguard")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build dnsguard: %v\n%s", err, out)
	}
	return exe
}

// interrupter ends a context when a text is written through it.
type interrupter struct {
	bytes.Buffer
	text   string
	cancel context.CancelFunc
}

func (i *interrupter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), i.text) {
		i.cancel()
	}
	return i.Buffer.Write(p)
}

// The scenario with the real daemon.
func TestIncident(t *testing.T) {
	labtest.Require(t)
	exe := buildDaemon(t)
	t.Run("whole", func(t *testing.T) { testWholeIncident(t, exe) })

	// Ctrl-C at a moment of the acts: everything goes, and nothing is waited
	// for longer than a query's time.
	for _, c := range []struct {
		name, text string
		play       func(ctx context.Context, out io.Writer, exe string) error
	}{
		{"interrupted without dnsguard", "asks every", func(ctx context.Context, out io.Writer, exe string) error {
			return lab.RunDemo(ctx, out, exe, "incident")
		}},
		{"interrupted while dnsguard runs", "asks every", lab.PlayAct},
		{"interrupted when the pod is dead", "killed", lab.PlayAct},
	} {
		t.Run(c.name, func(t *testing.T) {
			labtest.CheckLeaks(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := &interrupter{text: c.text, cancel: cancel}
			if err := c.play(ctx, out, exe); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v\n%s", err, &out.Buffer)
			}
		})
	}
}

// testWholeIncident plays it to the end: RunDemo returns nil only if the
// outage showed without dnsguard, the guard healed the client, and nothing failed
// with all of dnsguard.
func testWholeIncident(t *testing.T, exe string) {
	labtest.CheckLeaks(t)
	var out bytes.Buffer
	start := time.Now()
	err := lab.RunDemo(t.Context(), &out, exe, "incident")
	t.Logf("%v\n%s", time.Since(start), &out)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("took %v", took)
	}
	for _, want := range []string{
		`t=\+3\.\d s +dns-[ab] +killed`,
		`t=\+3\.\d s +kube-proxy +the rules now name dns-[ab] alone`,
		`t=\+\d\.\d s +envoy: \d timed out +new ports: \d answered`,
		`conntrack +10\.244\.0\.4:\d+ -> 10\.96\.0\.10:53 still leads to 10\.244\.0\.[23]:53`,
		`answered +\d+ +\d\d +\d\d\n`,
		`failed +2\d +\d +0\n`,
		`longest outage +\d+\.\d s, goes on +[0-2]\.\d s +none\n`,
		`envoy +was without an answer for [0-2]\.\d s, and has been answered since`,
		`conntrack +has no entry for envoy`,
	} {
		if !regexp.MustCompile(want).Match(out.Bytes()) {
			t.Errorf("the story lacks %q", want)
		}
	}
}

// A daemon that ends, or never answers, is reported with what it said.
func TestIncidentWithBrokenDaemon(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("ends at once", func(t *testing.T) {
		labtest.CheckLeaks(t)
		labtest.Require(t)
		t.Setenv(lab.RoleEnv, "exit")
		err := lab.PlayAct(t.Context(), io.Discard, self)
		if err == nil || !strings.Contains(err.Error(), "ended before it was ready") || !strings.Contains(err.Error(), "as told") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("never answers", func(t *testing.T) {
		labtest.CheckLeaks(t)
		labtest.Require(t)
		t.Setenv(lab.RoleEnv, "wait")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := lab.PlayAct(ctx, io.Discard, self)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "is not ready") || !strings.Contains(err.Error(), `"Namespace"`) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("is missing", func(t *testing.T) {
		labtest.CheckLeaks(t)
		labtest.Require(t)
		if err := lab.PlayAct(t.Context(), io.Discard, "/nonexistent"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

func TestUnknownScenario(t *testing.T) {
	if err := lab.RunDemo(t.Context(), io.Discard, "", "nothing"); !errors.Is(err, lab.ErrUnknownScenario) {
		t.Errorf("got %v", err)
	}
	seen := make(map[string]bool)
	for _, s := range lab.Scenarios() {
		if s.Name == "" || s.Summary == "" || s.Run == nil || seen[s.Name] {
			t.Errorf("scenario %+v", s)
		}
		seen[s.Name] = true
	}
}
