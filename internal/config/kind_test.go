package config

import (
	"testing"
	"time"
)

func TestMark(t *testing.T) {
	tests := []struct {
		text            string
		taken, upstream uint32
	}{
		{"0x30", 0x10, 0x20},
		{"48", 0x10, 0x20},
		{"0X80000001", 1, 0x80000000},
		{"0x3000", 0x1000, 0x2000},
	}
	for _, test := range tests {
		m, wrong := parseMark(test.text)
		if wrong != "" || m.Taken() != test.taken || m.Upstream() != test.upstream {
			t.Errorf("%s: taken %#x, upstream %#x, %q; want %#x, %#x", test.text, m.Taken(), m.Upstream(), wrong, test.taken, test.upstream)
		}
	}
}

func TestByteSize(t *testing.T) {
	tests := []struct {
		text string
		want ByteSize
		back string
	}{
		{"0", 0, "0"},
		{"1000", 1000, "1000"},
		{"1024", Ki, "1Ki"},
		{"1025", 1025, "1025"},
		{"32Mi", 32 * Mi, "32Mi"},
		{"1536Mi", 1536 * Mi, "1536Mi"},
		{"2048Mi", 2 * Gi, "2Gi"},
	}
	for _, test := range tests {
		got, wrong := parseByteSize(test.text)
		if wrong != "" || got != test.want || got.String() != test.back {
			t.Errorf("%s: %d bytes (%v), %q; want %d (%s)", test.text, got, got, wrong, test.want, test.back)
		}
	}
}

func TestFormatDuration(t *testing.T) {
	tests := []struct {
		d    time.Duration
		want string
	}{
		{0, "0s"},
		{time.Microsecond, "1µs"},
		{700 * time.Millisecond, "700ms"},
		{1200 * time.Millisecond, "1200ms"},
		{time.Second, "1s"},
		{90 * time.Second, "1m30s"},
		{61500 * time.Millisecond, "1m1.5s"},
		{5 * time.Minute, "5m"},
		{time.Hour, "1h"},
		{time.Hour + 10*time.Minute, "1h10m"},
		{time.Hour + time.Second, "1h0m1s"},
		{10 * time.Hour, "10h"},
	}
	for _, test := range tests {
		got := formatDuration(test.d)
		if got != test.want {
			t.Errorf("%v is written %s, want %s", test.d, got, test.want)
		}
		if back, wrong := parseDuration(got); wrong != "" || back != test.d {
			t.Errorf("%s is read as %v, %q; want %v", got, back, wrong, test.d)
		}
	}
}

func TestDistance(t *testing.T) {
	tests := []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "abc", 3},
		{"size", "size", 0},
		{"sise", "size", 1},
		{"gaurd", "guard", 1},
		{"server", "servers", 1},
		{"kitten", "sitting", 3},
		{"ca", "abc", 3}, // optimal string alignment does not edit what it swapped
	}
	for _, test := range tests {
		if got := distance(test.a, test.b); got != test.want {
			t.Errorf("distance(%q, %q) = %d, want %d", test.a, test.b, got, test.want)
		}
		if got := distance(test.b, test.a); got != test.want {
			t.Errorf("distance(%q, %q) = %d, want %d", test.b, test.a, got, test.want)
		}
	}
}
