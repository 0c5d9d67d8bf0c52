// Package docs holds the handbook; what of it a program can check is checked here.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// failureRows is how many failures FAILURES.md tells of at least: a row that is
// taken out is missed.
const failureRows = 45

// TestFailures: each row of FAILURES.md says what is expected, names tests that
// there are, and what came of them last.
func TestFailures(t *testing.T) {
	text, err := os.ReadFile("FAILURES.md")
	if err != nil {
		t.Fatal(err)
	}
	rows, tests := 0, map[string]map[string]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|--") || strings.TrimSpace(cells[0]) == "failure" {
			continue
		}
		rows++
		name := strings.TrimSpace(cells[0])
		if len(cells) != 4 {
			t.Errorf("%s: %d columns", name, len(cells))
			continue
		}
		for i, what := range []string{"failure", "expectation", "test", "result"} {
			if strings.TrimSpace(cells[i]) == "" {
				t.Errorf("%s: no %s", name, what)
			}
		}
		if named(t, name, cells[2], tests) == 0 {
			t.Errorf("%s: no test is named", name)
		}
	}
	if rows < failureRows {
		t.Errorf("%d rows, at least %d are expected", rows, failureRows)
	}
}

// named checks the tests of a cell, `directory` TestA, TestB/sub_test; `other` TestC,
// and returns how many there are. A row that has only a benchmark has no test.
func named(t *testing.T, row, cell string, tests map[string]map[string]string) (n int) {
	t.Helper()
	dir := ""
	for _, word := range regexp.MustCompile("`[^`]+`|(Test|Fuzz|Benchmark)[A-Za-z0-9]+(/[a-zA-Z0-9_-]+)?").FindAllString(cell, -1) {
		if strings.HasPrefix(word, "`") {
			dir = strings.Trim(word, "`")
			if tests[dir] == nil {
				tests[dir] = testsOf(t, dir)
			}
			continue
		}
		name, sub, _ := strings.Cut(word, "/")
		body, ok := tests[dir][name]
		if !ok {
			t.Errorf("%s: no %s in %q", row, name, dir)
			continue
		}
		if sub != "" && !strings.Contains(body, `"`+strings.ReplaceAll(sub, "_", " ")) {
			t.Errorf("%s: %s has no part %q", row, name, sub)
		}
		if !strings.HasPrefix(name, "Benchmark") {
			n++
		}
	}
	return n
}

// testsOf returns the text of each test of a package, which may be another module's.
func testsOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("no tests in %q: %v", dir, err)
	}
	out := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, file, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				out[fn.Name.Name] = string(text[set.Position(fn.Pos()).Offset:set.Position(fn.End()).Offset])
			}
		}
	}
	return out
}
