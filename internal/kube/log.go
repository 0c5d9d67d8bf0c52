package kube

import (
	"log/slog"

	"k8s.io/klog/v2"
)

// RouteLogs sends what client-go logs to h: details at levels below Info,
// failed requests (which [Config].OnProblem tells as well) at Info and Error.
// [slog.DiscardHandler] silences it. Without a call client-go writes to
// standard error.
//
// client-go logs through klog, whose destination belongs to the whole process
// and must not be changed while it is in use: main calls this once, before
// anything of this package runs.
func RouteLogs(h slog.Handler) { klog.SetSlogLogger(slog.New(h)) }
