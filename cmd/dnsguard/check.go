package main

import (
	"context"
	"flag"
	"fmt"
)

func checkCommand() command {
	return command{
		name:    "check",
		summary: "validate a configuration: exit 0, or 1 with a line for each problem",
		example: "dnsguard check --config /etc/dnsguard/config.yaml",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			_, load := configFlags(fs)
			effective := fs.Bool("print", false, "print the effective configuration, every key written out")
			return func(_ context.Context, c *cli, args []string) int {
				if !noArgs(c, "check", args) {
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("check", err)
				}
				if *effective {
					fmt.Fprint(c.out, cfg.String())
				}
				return exitOK
			}
		},
	}
}
