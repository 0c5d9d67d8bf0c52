package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzParse holds the package's invariants for any file: no panic; else every
// problem has a line that the file has, on one line; else the configuration's
// own text gives the same configuration.
func FuzzParse(f *testing.F) {
	groups, err := filepath.Glob("testdata/problems/*.txt")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range groups {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		for section := range strings.SplitSeq(string(text), "=== ") {
			_, rest, _ := strings.Cut(section, "\n")
			given, _, _ := strings.Cut(rest, "=> ")
			f.Add([]byte(given))
		}
	}
	complete, err := os.ReadFile("testdata/complete.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(complete)

	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f.yaml", data, nil)
		if err == nil {
			again, err := Parse("again.yaml", []byte(c.String()), nil)
			if err != nil {
				t.Fatalf("%v\nin the text of the configuration:\n%s", err, c)
			}
			equal(t, c, again)
			return
		}
		problems, ok := errors.AsType[Problems](err)
		if !ok || len(problems) == 0 || c != nil {
			t.Fatalf("got %v and error %v, want Problems alone", c, err)
		}
		// YAML has more line breaks than \n: \r, NEL, LS and PS.
		lines := len(data) + 1
		for i, p := range problems {
			if p.File != "f.yaml" || p.Line < 1 || p.Line > lines || p.Flag || p.Wrong == "" || strings.ContainsAny(p.String(), "\n\r") {
				t.Errorf("problem %#v", p)
			}
			if i > 0 && p.Line < problems[i-1].Line {
				t.Errorf("line %d comes after line %d", p.Line, problems[i-1].Line)
			}
		}
	})
}

// FuzzFlags is the same for the command line, where structures are YAML and
// everything else is words. The key is given by its place in the table.
func FuzzFlags(f *testing.F) {
	var paths []string
	keys(Default()).leaves(func(path string, _ key) { paths = append(paths, path) })
	for i := range paths {
		for _, text := range []string{"", "auto", "1", "2s", "8Mi", "10.0.0.1,::1", "{zones: [a], servers: [10.1.2.3]}", "{a: {stale: 1m}}"} {
			f.Add(uint8(i), text)
		}
	}
	f.Fuzz(func(t *testing.T, i uint8, text string) {
		path := paths[int(i)%len(paths)]
		c, err := Load("", &Flags{given: []setting{{path, text}}})
		if err == nil {
			again, err := Parse("again.yaml", []byte(c.String()), nil)
			if err != nil {
				t.Fatalf("%v\nin the text of the configuration:\n%s", err, c)
			}
			equal(t, c, again)
			return
		}
		problems, ok := errors.AsType[Problems](err)
		if !ok || len(problems) == 0 || c != nil {
			t.Fatalf("error %v, want Problems", err)
		}
		for _, p := range problems {
			if !p.Flag || p.File != "" || p.Key == "" || p.Wrong == "" || strings.ContainsAny(p.String(), "\n\r") {
				t.Errorf("problem %#v", p)
			}
		}
	})
}
