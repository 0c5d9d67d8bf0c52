package cache

import (
	"path/filepath"
	"strings"
	"testing"
)

// The rules of the cache, each as a script in virtual time.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 25 {
		t.Fatalf("only %d scripts", len(files))
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			playScript(t, file)
		})
	}
}
