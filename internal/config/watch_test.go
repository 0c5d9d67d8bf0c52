package config

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// mount lays content out as the kubelet does a ConfigMap: the file is a link
// into the directory that ..data points to, and a change replaces ..data.
func mount(t *testing.T, dir, version, content string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "config.yaml")
	must(t, os.Mkdir(filepath.Join(dir, version), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, version, "config.yaml"), []byte(content), 0o644))
	must(t, os.Symlink(version, filepath.Join(dir, "..data_tmp")))
	must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		must(t, os.Symlink(filepath.Join("..data", "config.yaml"), path))
	}
	return path
}

func write(t *testing.T, path, content string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(content), 0o644))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const missing = "(not there)"

func TestWatch(t *testing.T) {
	tests := []struct {
		name string
		// steps happen half an interval after each look, beginning before the watch.
		steps func(t *testing.T, dir string) (path string, steps []func())
		want  []string
	}{
		{
			"ConfigMap",
			func(t *testing.T, dir string) (string, []func()) {
				path := mount(t, dir, "..2026_1", "one")
				return path, []func(){
					func() { mount(t, dir, "..2026_2", "two") },
					func() { must(t, os.RemoveAll(filepath.Join(dir, "..2026_1"))) },
				}
			},
			[]string{"one", "two"},
		},
		{
			"written in place",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "resolv.conf")
				write(t, path, "one")
				return path, []func(){func() { write(t, path, "two") }}
			},
			[]string{"one", "two"},
		},
		{
			"written in two goes",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "resolv.conf")
				write(t, path, "one")
				return path, []func(){
					func() { write(t, path, "tw") },
					func() { write(t, path, "two") },
				}
			},
			[]string{"one", "two"},
		},
		{
			"replaced, as editors do",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "config.yaml")
				write(t, path, "one")
				return path, []func(){
					func() { must(t, os.Rename(path, path+"~")) },
					func() { write(t, path, "two") },
				}
			},
			[]string{"one", "two"},
		},
		{
			"touched",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "config.yaml")
				write(t, path, "one")
				return path, []func(){func() { write(t, path, "one") }}
			},
			[]string{"one"},
		},
		{
			"changed and changed back between looks",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "config.yaml")
				write(t, path, "one")
				return path, []func(){
					func() { write(t, path, "two") },
					func() { write(t, path, "one") },
				}
			},
			[]string{"one"},
		},
		{
			"not there at first",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "config.yaml")
				return path, []func(){nil, nil, func() { write(t, path, "one") }}
			},
			[]string{missing, "one"},
		},
		{
			"gone and back",
			func(t *testing.T, dir string) (string, []func()) {
				path := filepath.Join(dir, "config.yaml")
				write(t, path, "one")
				return path, []func(){
					func() { must(t, os.Remove(path)) }, nil, nil,
					func() { write(t, path, "one") },
				}
			},
			[]string{"one", missing, "one"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path, steps := test.steps(t, t.TempDir())
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var got []string
				go Watch(ctx, path, func(data []byte, err error) {
					if err != nil {
						if !errors.Is(err, fs.ErrNotExist) {
							t.Errorf("unexpected error: %v", err)
						}
						data = []byte(missing)
					}
					got = append(got, string(data))
				})
				time.Sleep(watchInterval / 2)
				for _, step := range append(steps, nil, nil) {
					if step != nil {
						step()
					}
					time.Sleep(watchInterval)
				}
				synctest.Wait()
				if !slices.Equal(got, test.want) {
					t.Errorf("reports %q, want %q", got, test.want)
				}
			})
		})
	}
}

// TestWatchLatency holds what the reference promises: a change is told within
// two seconds, and not before it has stood for a whole look.
func TestWatchLatency(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		reported := make(chan time.Time, 2)
		go Watch(ctx, path, func([]byte, error) { reported <- time.Now() })
		<-reported
		time.Sleep(time.Millisecond)
		changed := time.Now()
		write(t, path, "two")
		if took := (<-reported).Sub(changed); took < watchInterval || took > 2*time.Second {
			t.Errorf("told after %v, want %v to 2s", took, watchInterval)
		}
	})
}

// TestWatchEnds shows that Watch returns with its context and reports nothing
// more; synctest.Test fails if a goroutine or timer of it were left waiting.
func TestWatchEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "one")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		reports := 0
		go func() {
			defer close(ended)
			Watch(ctx, path, func([]byte, error) { reports++ })
		}()
		synctest.Wait()
		cancel()
		<-ended
		write(t, path, "two")
		Watch(ctx, path, func([]byte, error) { reports++ })
		if reports != 1 {
			t.Errorf("%d reports, want the first only", reports)
		}
	})
}
