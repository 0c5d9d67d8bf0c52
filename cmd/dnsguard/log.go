package main

import (
	"io"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/config"
)

// newLogger returns a logger to w whose level can be changed.
func newLogger(w io.Writer, c config.Log) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	level.Set(c.Level)
	opts := &slog.HandlerOptions{Level: level}
	if c.Format == config.LogText || c.Format == config.LogAuto && isTerminal(w) {
		return slog.New(slog.NewTextHandler(w, opts)), level
	}
	return slog.New(slog.NewJSONHandler(w, opts)), level
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS) //nolint:gosec // a file descriptor
	return err == nil
}
