package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// ask unpacks the next n questions.
func ask(t *testing.T, ns names, n int) (got []string) {
	t.Helper()
	for range n {
		buf := make([]byte, ns.longest())
		size := ns.next(buf)
		name, at, err := dns.UnpackDomainName(buf[:size], 0)
		if err != nil {
			t.Fatal(err)
		}
		if class := buf[size-1]; class != dns.ClassINET || size != at+4 {
			t.Fatalf("question % x: class %d, name ends at %d", buf[:size], class, at)
		}
		got = append(got, name+" "+dns.TypeToString[uint16(buf[at])<<8|uint16(buf[at+1])])
	}
	return got
}

func TestPattern(t *testing.T) {
	for _, tt := range []struct {
		name, pattern string
		n, first      uint64
		want          []string
	}{
		{"counts", "h##.a.example", 100, 0, []string{"h00.a.example. A", "h01.a.example. A", "h02.a.example. A"}},
		{"turns", "h##.example", 2, 0, []string{"h00.example. A", "h01.example. A", "h00.example. A"}},
		{"never turns", "x.h##.example.", 0, 98, []string{"x.h98.example. A", "x.h99.example. A", "x.h00.example. A"}},
		{"whole label", "###.example", 9, 0, []string{"000.example. A", "001.example. A", "002.example. A"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := newPattern(tt.pattern, "a", tt.n, tt.first)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, ask(t, p, 3)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestPatternShuffled(t *testing.T) {
	p, err := newPattern("h##.example", "A", 10, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.shuffle()
	seen := map[string]int{}
	for _, q := range ask(t, p, 1000) {
		seen[q]++
	}
	if len(seen) != 10 {
		t.Errorf("1,000 questions have %d names, want 10: %v", len(seen), seen)
	}
}

func TestPatternErrors(t *testing.T) {
	for _, tt := range []struct{ name, pattern, qtype string }{
		{"no digits", "host.example", "A"},
		{"run across labels", "h##.##.example", "A"},
		{"escape", `a\.h#.example`, "A"},
		{"label too long", strings.Repeat("x", 70) + "#.example", "A"},
		{"type", "h#.example", "NONESUCH"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if p, err := newPattern(tt.pattern, tt.qtype, 10, 0); err == nil {
				t.Errorf("newPattern(%q, %q) = %q, want an error", tt.pattern, tt.qtype, p.question)
			}
		})
	}
}

func TestReadList(t *testing.T) {
	file := filepath.Join(t.TempDir(), "names")
	text := "# what we ask\na.example\n\nb.example. AAAA\n  c.example\tmx\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := readList(file, "A")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"a.example. A", "b.example. AAAA", "c.example. MX", "a.example. A"}
	if diff := cmp.Diff(want, ask(t, l, 4)); diff != "" {
		t.Error(diff)
	}

	if _, err := readList(file+".none", "A"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("reading a missing file: %v", err)
	}
	if err := os.WriteFile(file, []byte("# nothing\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readList(file, "A"); err == nil {
		t.Error("a file without names is no error")
	}
}
