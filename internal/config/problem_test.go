package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestProblems plays testdata/problems: what an operator gave and every line
// that he gets for it. -update writes the lines anew.
//
//	=== name of the case
//	$ --flag=... --flag=...       (optional; without a file below it, there is no file)
//	the file
//	=> the problems
func TestProblems(t *testing.T) {
	groups, err := filepath.Glob("testdata/problems/*.txt")
	if err != nil || len(groups) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, path := range groups {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var rewritten strings.Builder
		for section := range strings.SplitSeq(strings.TrimPrefix(string(text), "=== "), "\n=== ") {
			name, rest, _ := strings.Cut(section, "\n")
			given, told, _ := strings.Cut(rest, "=> ")
			t.Run(strings.TrimSuffix(filepath.Base(path), ".txt")+"/"+name, func(t *testing.T) {
				got := problems(t, given)
				fmt.Fprintf(&rewritten, "=== %s\n%s=> %s\n\n", name, given, strings.Join(got, "\n=> "))
				if *update {
					return
				}
				want := strings.Split(strings.TrimSpace(told), "\n=> ")
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("problems (-want +got):\n%s\nof:\n%s", diff, given)
				}
			})
		}
		if *update && !t.Failed() {
			if err := os.WriteFile(path, []byte(strings.TrimSuffix(rewritten.String(), "\n")), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// problems loads one case's input and returns the lines of its error.
func problems(t *testing.T, given string) []string {
	t.Helper()
	var args []string
	if line, rest, ok := strings.Cut(given, "\n"); ok && strings.HasPrefix(line, "$ ") {
		for arg := range strings.SplitSeq(line, " --") {
			args = append(args, "--"+arg)
		}
		args, given = args[1:], rest
	}
	flags := parseFlags(t, args...)
	var err error
	if args != nil && given == "" {
		_, err = Load("", flags)
	} else {
		_, err = Parse("f.yaml", []byte(given), flags)
	}
	if _, ok := errors.AsType[Problems](err); !ok {
		t.Fatalf("error %v, want Problems", err)
	}
	return strings.Split(err.Error(), "\n")
}

// TestProblem holds the fields that another program than an operator reads.
func TestProblem(t *testing.T) {
	_, err := Parse("f.yaml", []byte("aaaa: drop\n"), parseFlags(t, "--search.ndots=16"))
	got, ok := errors.AsType[Problems](err)
	if !ok {
		t.Fatalf("error %v, want Problems", err)
	}
	want := Problems{
		{File: "f.yaml", Line: 1, Key: "aaaa", Wrong: `"drop" is unknown`, Allowed: "pass or nodata"},
		{Flag: true, Key: "search.ndots", Wrong: `"16" is too large`, Allowed: "a whole number from 0 to 15"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}
