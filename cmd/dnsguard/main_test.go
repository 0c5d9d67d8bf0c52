package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// dispatched runs a command line and returns what it printed.
func dispatched(t *testing.T, args ...string) (code int, out, err string) {
	t.Helper()
	var o, e bytes.Buffer
	code = dispatch(t.Context(), &cli{out: &o, err: &e}, args)
	return code, o.String(), e.String()
}

func TestCommandLine(t *testing.T) {
	tests := map[string]struct {
		args []string
		code int
		out  string // contained
		err  string
	}{
		"nothing":               {nil, exitUsage, "", "Commands:"},
		"help":                  {[]string{"--help"}, exitOK, "Commands:", ""},
		"no such command":       {[]string{"serve"}, exitUsage, "", `no command "serve"`},
		"no such flag":          {[]string{"run", "--lisen=x"}, exitUsage, "", "lisen"},
		"an operand":            {[]string{"check", "file"}, exitUsage, "", `"file"`},
		"version":               {[]string{"version"}, exitOK, "dnsguard unknown", ""},
		"--version":             {[]string{"--version"}, exitOK, "dnsguard unknown", ""},
		"version in no format":  {[]string{"version", "-o", "xml"}, exitUsage, "", "xml"},
		"check by flags":        {[]string{"check", "--listen=127.0.0.1"}, exitOK, "", ""},
		"check a wrong value":   {[]string{"check", "--cache.size=much"}, exitWrong, "", "--cache.size"},
		"check without a file":  {[]string{"check", "--config=/nonexistent"}, exitWrong, "", "/nonexistent"},
		"the effective values":  {[]string{"check", "--print", "--cache.size=8Mi"}, exitOK, "size: 8Mi", ""},
		"the guard follows":     {[]string{"check", "--print", "--kubernetes.dnsService=dns/coredns"}, exitOK, "services: [dns/coredns]", ""},
		"list of scenarios":     {[]string{"demo", "--list"}, exitOK, "incident", ""},
		"no such scenario":      {[]string{"demo", "--scenario=none"}, exitUsage, "", "none"},
		"health without daemon": {[]string{"health", "--control=/nonexistent/control.sock"}, exitWrong, "", "no running dnsguard"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			code, out, err := dispatched(t, tt.args...)
			if code != tt.code || !strings.Contains(out, tt.out) || !strings.Contains(err, tt.err) {
				t.Errorf("code %d, output %q, errors %q; want code %d, %q, %q", code, out, err, tt.code, tt.out, tt.err)
			}
			if code == exitOK && err != "" || code != exitOK && out != "" {
				t.Errorf("results and errors are mixed: output %q, errors %q", out, err)
			}
		})
	}
}

// TestHelpHasExamples: --help of every command prints its flags and an example
// that the command line understands.
func TestHelpHasExamples(t *testing.T) {
	for _, cmd := range commands() {
		t.Run(cmd.name, func(t *testing.T) {
			code, out, _ := dispatched(t, cmd.name, "--help")
			if code != exitOK || !strings.Contains(out, cmd.summary) || !strings.Contains(out, cmd.example) {
				t.Errorf("code %d, help:\n%s", code, out)
			}
			own, keys, _ := strings.Cut(out, "Keys of the configuration")
			if strings.Contains(own, "--cache.size") || strings.Contains(keys, "--config") {
				t.Errorf("the command's own flags do not come before the keys:\n%s", out)
			}
			words := strings.Fields(cmd.example)
			if words[0] != "dnsguard" || words[1] != cmd.name {
				t.Errorf("example %q is of another command", cmd.example)
			}
			if code, _, err := dispatched(t, append(words[1:], "--help")...); code != exitOK {
				t.Errorf("example %q: code %d: %s", cmd.example, code, err)
			}
		})
	}
}

func TestVersionJSON(t *testing.T) {
	_, out, _ := dispatched(t, "version", "-o", "json")
	var v map[string]string
	if err := json.Unmarshal([]byte(out), &v); err != nil || v["version"] == "" || v["goversion"] == "" {
		t.Errorf("%v in %q", err, out)
	}
}

// TestCheckListsEverything: one line a problem, with file, line and key.
func TestCheckListsEverything(t *testing.T) {
	file := writeFile(t, "config.yaml", "listn: [x]\ncache: {size: 1}\nlimits: {inFlight: 0}\n")
	code, _, err := dispatched(t, "check", "--config", file)
	lines := strings.Split(strings.TrimSpace(err), "\n")
	if code != exitWrong || len(lines) != 3 {
		t.Fatalf("code %d:\n%s", code, err)
	}
	for i, want := range []string{"config.yaml:1: listn:", "config.yaml:2: cache.size:", "config.yaml:3: limits.inFlight:"} {
		if !strings.Contains(lines[i], want) {
			t.Errorf("line %d is %q, want %q in it", i, lines[i], want)
		}
	}
}
