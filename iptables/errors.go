package iptables

import "errors"

var (
	// ErrNotSupported reports that this kernel, or this machine, cannot do what
	// a backend needs. It is wrapped with what is missing.
	ErrNotSupported = errors.New("not supported")
	// ErrRunning reports that Cleanup found a living process that intercepts, or
	// has the kernel count.
	ErrRunning = errors.New("another process is at work")
	// ErrClosed reports a use of an Interceptor after Close.
	ErrClosed = errors.New("interception is closed")
)

// ConfigError is a problem with a setting, or that a setting can solve.
type ConfigError struct {
	Key     string // of the configuration file, for example "intercept.mark"
	Problem string // what is wrong
	Remedy  string // what to do about it
	Err     error  // the cause, if there is one
}

// Error returns "key: problem: cause: remedy".
func (e *ConfigError) Error() string {
	s := e.Key + ": " + e.Problem
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s + ": " + e.Remedy
}

// Unwrap returns the cause.
func (e *ConfigError) Unwrap() error { return e.Err }
