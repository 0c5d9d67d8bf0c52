package config

import (
	"strings"
	"testing"
)

func TestReference(t *testing.T) {
	golden(t, "../../docs/configuration.md", Reference())
}

// TestReferenceIsComplete shows that every key has its row.
func TestReferenceIsComplete(t *testing.T) {
	text := Reference()
	keys(Default()).leaves(func(path string, k key) {
		if row := "| `" + path + "` | " + k.value.allowed() + " | "; !strings.Contains(text, row) {
			t.Errorf("no row %q", row)
		}
	})
}
