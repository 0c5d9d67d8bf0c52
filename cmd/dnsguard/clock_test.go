package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// wallClock are the functions and methods of package time that read, make or keep
// a time without the monotonic clock's reading: whatever is compared with their
// results jumps when somebody sets the clock. time.Unix is none of them: it makes
// deadlines that have passed whatever the clock says.
var wallClock = []string{
	"Unix", "UnixNano", "UnixMilli", "UnixMicro", "Date", "AddDate", "Parse", "ParseInLocation",
	"Local", "UTC", "In", "Round", "Truncate", "YearDay", "Clock", "Hour", "Minute", "Second", "Nanosecond",
}

// kernelsTime are the places in which the wall clock is what the kernel tells: of
// a flow, when it began (CTA_TIMESTAMP), which is but compared for equality.
var kernelsTime = []string{"f.Start.UnixNano"}

// TestNoWallClock: a clock that jumps changes nothing, because nobody asks what
// time it is: instants carry the monotonic clock's reading, and nothing takes it
// from them. The kernel's clock cannot be set for one process; its absence in the
// code can be shown.
func TestNoWallClock(t *testing.T) {
	files := 0
	for _, dir := range []string{"../../resolver", "../../ctguard", "../../iptables", "../../internal/dnswire", "../../internal/kube", "../../internal/config", "."} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files++
			for _, where := range readsWallClock(t, path) {
				t.Errorf("%s: a time without the monotonic clock's reading", where)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 100 {
		t.Errorf("only %d files were looked at", files)
	}
}

// readsWallClock returns where a file uses one of wallClock on a time or the
// package.
func readsWallClock(t *testing.T, path string) (where []string) {
	t.Helper()
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || !slices.Contains(wallClock, sel.Sel.Name) {
			return true
		}
		x, plain := sel.X.(*ast.Ident)
		functions := []string{"Parse", "ParseInLocation", "Unix"} // those of package time; methods of others have such names
		switch {
		case plain && x.Name == "time" && sel.Sel.Name == "Unix": // see above
			return true
		case sel.Sel.Name != "Unix" && slices.Contains(functions, sel.Sel.Name) && !(plain && x.Name == "time"):
			return true
		case plain && x.Name != "time" && importsPackage(f, x.Name):
			return true
		case slices.Contains(kernelsTime, types.ExprString(call.Fun)):
			return true
		}
		if durations := []string{"Round", "Truncate"}; slices.Contains(durations, sel.Sel.Name) && ofDuration(sel.X) {
			return true
		}
		where = append(where, set.Position(call.Pos()).String()+": "+sel.Sel.Name)
		return true
	})
	return where
}

func importsPackage(f *ast.File, name string) bool {
	return slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool {
		path := strings.Trim(i.Path.Value, `"`)
		return i.Name != nil && i.Name.Name == name || path[strings.LastIndex(path, "/")+1:] == name
	})
}

// ofDuration reports whether an expression is a Duration by its form: a difference
// of times.
func ofDuration(x ast.Expr) bool {
	call, ok := x.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	return ok && slices.Contains([]string{"Since", "Until", "Sub", "Duration"}, sel.Sel.Name)
}

// TestWallClockIsFound: what TestNoWallClock looks for, it would find.
func TestWallClockIsFound(t *testing.T) {
	if len(readsWallClock(t, "node_failure_test.go")) == 0 {
		t.Error("the UnixNano of a test is not found")
	}
}
