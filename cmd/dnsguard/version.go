package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"runtime"
)

// version is set when the binary is linked.
var version = "unknown"

func versionCommand() command {
	return command{
		name:    "version",
		summary: "print the version",
		example: "dnsguard version -o json",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			format := outputFlag(fs)
			return func(_ context.Context, c *cli, args []string) int {
				if !noArgs(c, "version", args) {
					return exitUsage
				}
				if *format == "json" {
					return c.json(map[string]string{
						"version": version, "goversion": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
					})
				}
				fmt.Fprintf(c.out, "dnsguard %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
				return exitOK
			}
		},
	}
}

// outputFlag defines -o.
func outputFlag(fs *flag.FlagSet) *string {
	format := "text"
	fs.Func("o", "output: text or json (default text)", func(s string) error {
		if s != "text" && s != "json" {
			return fmt.Errorf("%q is neither text nor json", s)
		}
		format = s
		return nil
	})
	return &format
}

// json prints v.
func (c *cli) json(v any) int {
	e := json.NewEncoder(c.out)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		fmt.Fprintln(c.err, err)
		return exitWrong
	}
	return exitOK
}
