package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/config"
)

// Exit codes.
const (
	exitOK    = 0
	exitWrong = 1 // the thing asked about is wrong
	exitUsage = 2
)

// cli is where a subcommand reads and writes.
type cli struct {
	out io.Writer
	err io.Writer
}

// fail prints an error and returns the code for it.
func (c *cli) fail(command string, err error) int {
	if problems, ok := errors.AsType[config.Problems](err); ok {
		fmt.Fprintln(c.err, problems) // each line says where
		return exitWrong
	}
	fmt.Fprintf(c.err, "dnsguard %s: %v\n", command, err)
	return exitWrong
}

// command is one subcommand.
type command struct {
	name    string
	summary string
	example string
	// setup defines the command's flags, and returns what runs it.
	setup func(fs *flag.FlagSet) func(ctx context.Context, c *cli, args []string) int
}

func commands() []command {
	return []command{
		runCommand(),
		checkCommand(),
		demoCommand(),
		healthCommand(),
		explainCommand(),
		flowsCommand(),
		rulesCommand(),
		cleanupCommand(),
		versionCommand(),
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := dispatch(ctx, &cli{out: os.Stdout, err: os.Stderr}, os.Args[1:])
	stop()
	os.Exit(code)
}

// dispatch runs the subcommand that args name.
func dispatch(ctx context.Context, c *cli, args []string) int {
	if len(args) == 0 {
		usage(c.err)
		return exitUsage
	}
	switch args[0] {
	case "-h", "-help", "--help", "help":
		usage(c.out)
		return exitOK
	case "--version", "-version":
		args[0] = "version"
	}
	for _, cmd := range commands() {
		if cmd.name == args[0] {
			return cmd.run(ctx, c, args[1:])
		}
	}
	fmt.Fprintf(c.err, "dnsguard: there is no command %q; dnsguard --help lists them\n", args[0])
	return exitUsage
}

func (cmd *command) run(ctx context.Context, c *cli, args []string) int {
	fs := flag.NewFlagSet(cmd.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	do := cmd.setup(fs)
	args, err := parseInterspersed(fs, args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		cmd.help(c.out, fs)
		return exitOK
	case err != nil:
		fmt.Fprintf(c.err, "dnsguard %s: %v; dnsguard %s --help lists its flags\n", cmd.name, err, cmd.name)
		return exitUsage
	}
	return do(ctx, c, args)
}

// parseInterspersed parses flags wherever they stand, as people write them, and
// returns the operands.
func parseInterspersed(fs *flag.FlagSet, args []string) (operands []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		if fs.NArg() == 0 {
			return operands, nil
		}
		operands = append(operands, fs.Arg(0))
		args = fs.Args()[1:]
	}
}

func (cmd *command) help(w io.Writer, fs *flag.FlagSet) {
	fmt.Fprintf(w, "dnsguard %s: %s\n\nExample:\n\n    %s\n", cmd.name, cmd.summary, cmd.example)
	keys := flag.NewFlagSet("", flag.ContinueOnError)
	config.RegisterFlags(keys)
	isKey := func(f *flag.Flag) bool { return keys.Lookup(f.Name) != nil }
	// The few of the command itself would be lost among the keys.
	helpFlags(w, "Flags:", fs, func(f *flag.Flag) bool { return !isKey(f) })
	helpFlags(w, "Keys of the configuration, which win over the file:", fs, isKey)
}

func helpFlags(w io.Writer, title string, fs *flag.FlagSet, which func(*flag.Flag) bool) {
	first := true
	fs.VisitAll(func(f *flag.Flag) {
		if !which(f) {
			return
		}
		if first {
			fmt.Fprintf(w, "\n%s\n", title)
		}
		first = false
		fmt.Fprintf(w, "\n    --%s", f.Name)
		if f.DefValue != "" {
			fmt.Fprintf(w, "   (default %s)", f.DefValue)
		}
		for line := range strings.SplitSeq(f.Usage, "\n") {
			fmt.Fprintf(w, "\n        %s", line)
		}
		fmt.Fprintln(w)
	})
}

func usage(w io.Writer) {
	fmt.Fprint(w, "dnsguard answers a node's DNS queries from a local cache and keeps its connection\ntracking free of DNS flows to pods that are gone.\n\nCommands:\n\n")
	for _, cmd := range commands() {
		fmt.Fprintf(w, "    %-8s %s\n", cmd.name, cmd.summary)
	}
	fmt.Fprint(w, "\ndnsguard COMMAND --help shows its flags and an example.\n")
}

// noArgs refuses operands.
func noArgs(c *cli, command string, args []string) bool {
	if len(args) > 0 {
		fmt.Fprintf(c.err, "dnsguard %s: unexpected argument %q; flags come as --name=value\n", command, args[0])
		return false
	}
	return true
}

// configFlags defines --config and a flag for every key, and returns how to
// load them.
func configFlags(fs *flag.FlagSet) (path *string, load func() (*config.Config, error)) {
	path = fs.String("config", "", "configuration file (YAML); without one, a stand-alone cache\nin front of the nameservers of /etc/resolv.conf")
	flags := config.RegisterFlags(fs)
	return path, func() (*config.Config, error) { return config.Load(*path, flags) }
}
