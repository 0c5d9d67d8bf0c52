package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

func healthCommand() command {
	return command{
		name:    "health",
		summary: "ask the running daemon whether it works: exit 0, or 1 with the reasons",
		example: "dnsguard health --ready",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			ready := fs.Bool("ready", false, "whether it is ready, not only alive")
			timeout := fs.Duration("timeout", time.Second, "how long it may take to answer")
			_, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "health", args) {
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("health", err)
				}
				page := "/healthz"
				if *ready {
					page = "/readyz"
				}
				ctx, cancel := context.WithTimeout(ctx, *timeout)
				defer cancel()
				body, err := askDaemon(ctx, cfg.Control, page)
				if err != nil {
					return c.fail("health", err)
				}
				fmt.Fprintln(c.out, body)
				return exitOK
			}
		},
	}
}

// errNoDaemon tells that nothing answers on the control socket.
var errNoDaemon = errors.New("no running dnsguard answers on the control socket")

// statusError is an answer with a status other than 200; its text is the body's.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return e.text }

// askDaemon gets a page from the running daemon over its control socket. A
// status other than 200 is a *statusError.
func askDaemon(ctx context.Context, control, page string) (string, error) {
	return callDaemon(ctx, http.MethodGet, control, page)
}

// postDaemon has the running daemon do something.
func postDaemon(ctx context.Context, control, page string) (string, error) {
	return callDaemon(ctx, http.MethodPost, control, page)
}

// getJSON gets a page as JSON into v.
func getJSON(ctx context.Context, control, page string, v any) error {
	body, err := askDaemon(ctx, control, page)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(body), v)
}

func callDaemon(ctx context.Context, method, control, page string) (string, error) {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", control)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://dnsguard"+page, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w %s: %w", errNoDaemon, control, errors.Unwrap(err))
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return "", fmt.Errorf("read from %s: %w", control, err)
	}
	text := strings.TrimSpace(string(body))
	if resp.StatusCode != http.StatusOK {
		return "", &statusError{resp.StatusCode, text}
	}
	return text, nil
}
