package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"text/tabwriter"

	"github.com/dnsguard/dnsguard/internal/lab"
)

func demoCommand() command {
	return command{
		name:    "demo",
		summary: "play an incident in a network-namespace laboratory on this machine (root)",
		example: "dnsguard demo --scenario incident",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			scenario := fs.String("scenario", "incident", "which scenario to play")
			list := fs.Bool("list", false, "list the scenarios")
			return func(ctx context.Context, c *cli, args []string) int {
				if !noArgs(c, "demo", args) {
					return exitUsage
				}
				if *list {
					w := tabwriter.NewWriter(c.out, 0, 0, 3, ' ', 0)
					for _, s := range lab.Scenarios() {
						fmt.Fprintf(w, "%s\t%s\n", s.Name, s.Summary)
					}
					_ = w.Flush()
					return exitOK
				}
				exe, err := os.Executable()
				if err != nil {
					return c.fail("demo", fmt.Errorf("find the dnsguard program: %w", err))
				}
				switch err := lab.RunDemo(ctx, c.out, exe, *scenario); {
				case err == nil:
					return exitOK
				case errors.Is(err, lab.ErrUnknownScenario):
					fmt.Fprintf(c.err, "dnsguard demo: %v; dnsguard demo --list shows them\n", err)
					return exitUsage
				case errors.Is(err, context.Canceled):
					return exitWrong // the story has said so
				default:
					return c.fail("demo", err)
				}
			}
		},
	}
}
