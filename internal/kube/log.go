package kube

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"

	"k8s.io/klog/v2"
)

// RouteLogs sends what client-go logs to h: details at levels below Info,
// failed requests (which [Config].OnProblem tells as well) at Info and Error.
// [slog.DiscardHandler] silences it. Without a call client-go writes to
// standard error.
//
// client-go logs through klog, whose destination belongs to the whole process
// and must not be set while it is in use: main calls this before anything of this
// package runs. Later calls change where it goes at any time.
func RouteLogs(h slog.Handler) {
	routed.to.Store(&h)
	routed.once.Do(func() { klog.SetSlogLogger(slog.New(router{})) })
}

//nolint:gochecknoglobals // klog's destination is the process's
var routed struct {
	once sync.Once
	to   atomic.Pointer[slog.Handler]
}

// router hands on to where RouteLogs said last.
type router struct{}

func (router) handler() slog.Handler { return *routed.to.Load() }

// Enabled is that of where it leads.
func (r router) Enabled(ctx context.Context, l slog.Level) bool { return r.handler().Enabled(ctx, l) }

// Handle hands a record on.
func (r router) Handle(ctx context.Context, rec slog.Record) error {
	return r.handler().Handle(ctx, rec)
}

// WithAttrs returns a handler that goes on leading where this one leads now.
func (r router) WithAttrs(attrs []slog.Attr) slog.Handler { return r.handler().WithAttrs(attrs) }

// WithGroup is like WithAttrs.
func (r router) WithGroup(name string) slog.Handler { return r.handler().WithGroup(name) }
