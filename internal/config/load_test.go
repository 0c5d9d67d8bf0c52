package config

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "# a comment\naaaa: drop\n")
	_, err := Load(path, nil)
	want := path + `:2: aaaa: "drop" is unknown, allowed: pass or nodata`
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestLoadUnreadable(t *testing.T) {
	dir := t.TempDir()
	missing, large := filepath.Join(dir, "missing.yaml"), filepath.Join(dir, "large.yaml")
	must(t, os.WriteFile(large, bytes.Repeat([]byte("#"), maxFile+1), 0o644))
	tests := []struct {
		name string
		path string
		want string
	}{
		{"missing", missing, "read configuration: open " + missing + ": no such file or directory"},
		{"directory", dir, "read configuration: read " + dir + ": is a directory"},
		{"too large", large, "read configuration: " + large + ": larger than 1 MiB"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Load(test.path, nil)
			if err == nil || err.Error() != test.want {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
			if problems, ok := errors.AsType[Problems](err); ok {
				t.Errorf("error is Problems: %v", problems)
			}
		})
	}
	if _, err := Load(missing, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v is not fs.ErrNotExist", err)
	}
}

func TestLoadLargest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(path, bytes.Repeat([]byte("#"), maxFile), 0o644))
	c, err := Load(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, Default(), c)
}
