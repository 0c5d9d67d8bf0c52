package main

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestFigure(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []float64
		want   figure
		ok     bool
	}{
		{"nothing", nil, figure{}, false},
		{"one", []float64{3}, figure{3, 3, 3}, true},
		{"odd", []float64{9, 1, 4}, figure{4, 1, 9}, true},
		{"even", []float64{9, 1, 4, 2}, figure{3, 1, 9}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serverResults{Values: map[metric][]float64{hitQPS: tt.values}}
			if got, ok := s.figure(hitQPS); got != tt.want || ok != tt.ok {
				t.Errorf("figure(%v) = %v, %v; want %v, %v", tt.values, got, ok, tt.want, tt.ok)
			}
		})
	}
}

func TestThousands(t *testing.T) {
	for _, tt := range []struct {
		v      float64
		digits int
		want   string
	}{
		{0, 0, "0"},
		{999, 0, "999"},
		{1000, 0, "1,000"},
		{1234567.891, 2, "1,234,567.89"},
		{-4567, 0, "-4,567"},
		{-123, 1, "-123.0"},
	} {
		if got := thousands(tt.v, tt.digits); got != tt.want {
			t.Errorf("thousands(%v, %d) = %q, want %q", tt.v, tt.digits, got, tt.want)
		}
	}
}

func TestVersionLine(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"first words", "\n  Version 1.17.1 \nmore\n", "Version 1.17.1"},
		{"logged", "Nov 30 09:28:09 PowerDNS Recursor 4.8.8 (C)\n", "PowerDNS Recursor 4.8.8 (C)"},
		{"silent", "", ""},
	} {
		if got := versionLine(tt.text); got != tt.want {
			t.Errorf("%s: versionLine(%q) = %q, want %q", tt.name, tt.text, got, tt.want)
		}
	}
}

func TestQuiet(t *testing.T) {
	for _, tt := range []struct {
		load string
		want bool
	}{
		{"0.08 1.50 2.00", true},
		{"0.50 0.00 0.00", false},
		{"12.3 1.50 2.00", false},
		{"", false},
	} {
		r := &results{Load: tt.load}
		if got := r.quiet(); got != tt.want {
			t.Errorf("quiet with load %q = %v", tt.load, got)
		}
	}
}

func TestReport(t *testing.T) {
	r := &results{
		Date: "2026-01-02", Kernel: "6.1.0", CPU: "an example, 2 CPUs", Go: "go1.26.0", Load: "0.00 0.01 0.02",
		Rounds: 3, Duration: "5s",
		Servers: []serverResults{
			{Name: "echo", Values: map[metric][]float64{hitQPS: {250e3, 240e3, 255e3}, hitCPU: {3.7, 3.8, 3.6}, cpu5k: {14, 14, 13}}},
			{Name: "dnsguard", Version: "dnsguard v0", Values: map[metric][]float64{
				hitQPS: {219e3}, hitCPU: {4.24}, cpu5k: {24}, missCPU: {12.3}, bytesPerEntry: {407}, rssEmpty: {6 << 20}, lost: {0},
			}},
			{Name: "a<b", Version: "1", Values: map[metric][]float64{missCPU: {36.1, 36.1}, bytesPerEntry: {659}}},
		},
	}
	for name, got := range map[string]string{"report.md": r.markdown(), "report.svg": r.plot()} {
		file := filepath.Join("testdata", name)
		if *update {
			if err := os.MkdirAll("testdata", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
}

func TestResultsKeepTheirValues(t *testing.T) {
	dir := t.TempDir()
	r := &results{Date: "2026-01-02", Servers: []serverResults{{Name: "echo", Values: map[metric][]float64{}}}}
	r.add("echo", sample{hitQPS: 1})
	r.add("echo", sample{hitQPS: 2, hitCPU: 3})
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	got, err := readResults(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, got); diff != "" {
		t.Error(diff)
	}
	want := map[metric][]float64{hitQPS: {1, 2}, hitCPU: {3}}
	if diff := cmp.Diff(want, got.Servers[0].Values); diff != "" {
		t.Error(diff)
	}
}
