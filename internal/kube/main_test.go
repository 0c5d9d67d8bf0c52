package kube

import (
	"log/slog"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	RouteLogs(slog.DiscardHandler)
	os.Exit(m.Run())
}
