package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrUnknownScenario reports a name that Scenarios does not have.
var ErrUnknownScenario = errors.New("unknown scenario")

// Env is what a scenario gets from the program that plays it.
type Env struct {
	Out    io.Writer // the story
	Exe    string    // path of the dnsguard executable
	Colour bool      // Out is a terminal that shows colours
}

// Scenario is a story that can be played on any machine with a laboratory.
type Scenario struct {
	Name    string
	Summary string // one line
	// Run plays it: it returns nil only if what the story claims has happened.
	// It leaves nothing behind, also when ctx ends it early.
	Run func(ctx context.Context, env *Env) error
}

// Scenarios lists every scenario.
func Scenarios() []Scenario {
	return []Scenario{
		{
			Name:    "incident",
			Summary: "a DNS pod dies under a client that keeps its source port: without dnsguard, with its guard, with all of it",
			Run:     runIncident,
		},
		{Name: "kill", Summary: "dnsguard is killed under load and started again", Run: runKill},
		{Name: "hang", Summary: "dnsguard hangs under load and goes on", Run: runHang},
		{Name: "upgrade", Summary: "a new dnsguard takes over from an old one under load", Run: runUpgrade},
	}
}

// RunDemo plays the named scenario with the dnsguard executable at exe and
// tells it to out. Errors: ErrUnknownScenario, ErrUnavailable, ctx's own where
// it was interrupted, else what went differently from the story.
func RunDemo(ctx context.Context, out io.Writer, exe, scenario string) error {
	for _, s := range Scenarios() {
		if s.Name != scenario {
			continue
		}
		if err := Available(); err != nil {
			return err
		}
		if err := s.Run(ctx, &Env{Out: out, Exe: exe, Colour: showsColour(out)}); err != nil {
			return fmt.Errorf("scenario %s: %w", scenario, err)
		}
		return nil
	}
	return fmt.Errorf("%w %q", ErrUnknownScenario, scenario)
}

// showsColour tells whether out is a terminal whose user has not asked for
// plain text (https://no-color.org).
func showsColour(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
