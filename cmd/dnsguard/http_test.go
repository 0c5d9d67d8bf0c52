package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestControlNotToBeHad: the warning says once whose it is, and what to do.
func TestControlNotToBeHad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	listen := func() (net.Listener, error) { return listenControl(ctx, filepath.Join(file, "control.sock")) }
	l, err := listen()
	if err == nil {
		t.Fatalf("a socket below a file: %v", l.Addr())
	}
	end()
	d := &daemon{log: slog.New(slog.DiscardHandler), conditions: newConditions(nil)}
	d.servePages(ctx, "control", nil, err, true, listen)
	_, warnings := d.conditions.get()
	if len(warnings) != 1 || strings.Count(warnings[0], "control: ") != 1 || !strings.HasPrefix(warnings[0], "control: mkdir ") || !strings.Contains(warnings[0], "--control=PATH") {
		t.Errorf("warnings %q", warnings)
	}
}
