package docs

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// directoriesWithCode is how many there are at least: a walk that misses some is noticed.
const directoriesWithCode = 27

// TestArchitecture: the tables of ARCHITECTURE.md name each directory that has Go code and
// each at the top of the tree, and no other.
func TestArchitecture(t *testing.T) {
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	root := os.DirFS("..")
	code, top := map[string]bool{}, map[string]bool{}
	err = fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		base := path.Base(name)
		switch {
		case err != nil:
			return err
		case name == ".":
		case d.IsDir() && (strings.HasPrefix(base, ".") || base == "testdata" || name == "bin"): // bin is built
			return fs.SkipDir
		case path.Ext(base) == ".go":
			code[path.Dir(name)] = true
		case d.IsDir() && !strings.Contains(name, "/"):
			top[name] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(section(t, string(text), "Packages"), -1) {
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			named = append(named, m[1])
		}
	}
	for i, dir := range named {
		if info, err := fs.Stat(root, dir); err != nil || !info.IsDir() {
			t.Errorf("%s is no directory", dir)
		}
		if slices.Contains(named[:i], dir) {
			t.Errorf("%s is named twice", dir)
		}
	}
	for dir := range code {
		if !slices.Contains(named, dir) {
			t.Errorf("%s has Go code and is not named", dir)
		}
	}
	for dir := range top {
		// One of directories alone is named by these.
		if !slices.ContainsFunc(named, func(n string) bool { return n == dir || strings.HasPrefix(n, dir+"/") }) {
			t.Errorf("%s is not named", dir)
		}
	}
	if len(code) < directoriesWithCode || !top["scripts"] {
		t.Errorf("%d directories with Go code, at least %d are expected; %v", len(code), directoriesWithCode, top)
	}
}

// section returns what is below a heading of the second level.
func section(t *testing.T, page, heading string) string {
	t.Helper()
	_, rest, ok := strings.Cut(page, "\n## "+heading+"\n")
	if !ok {
		t.Fatalf("no section %s", heading)
	}
	body, _, _ := strings.Cut(rest, "\n## ")
	return body
}
