package lab

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// story writes what happens, as lines with the time since a chapter began.
type story struct {
	out    io.Writer
	colour bool
	start  time.Time
}

// tone colours a line on a terminal, by its ANSI number.
type tone int

const (
	plain tone = 0
	bad   tone = 31
	good  tone = 32
	event tone = 33
	title tone = 1
)

func (s *story) paint(t tone, text string) string {
	if !s.colour || t == plain {
		return text
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", t, text)
}

// chapter begins a part: its times count from now.
func (s *story) chapter(name string) {
	s.start = time.Now()
	_, _ = fmt.Fprintf(s.out, "\n%s\n", s.paint(title, name))
}

// say writes a line without a time.
func (s *story) say(format string, args ...any) {
	_, _ = fmt.Fprintf(s.out, "  "+format+"\n", args...)
}

// at writes a line of the timeline.
func (s *story) at(t tone, who, format string, args ...any) {
	line := fmt.Sprintf("t=+%-6s %-11s %s", fmt.Sprintf("%.1f s", time.Since(s.start).Seconds()), who, fmt.Sprintf(format, args...))
	_, _ = fmt.Fprintf(s.out, "  %s\n", s.paint(t, line))
}

// table writes rows of a label and a value in each column.
func (s *story) table(head []string, rows [][]string) {
	line := func(cells []string) string {
		var text strings.Builder
		fmt.Fprintf(&text, "  %-34s", cells[0])
		for _, c := range cells[1:] {
			fmt.Fprintf(&text, "%20s", c)
		}
		return text.String() + "\n"
	}
	_, _ = fmt.Fprint(s.out, line(append([]string{""}, head...)))
	_, _ = fmt.Fprintf(s.out, "  %s\n", strings.Repeat("-", 34+20*len(head)))
	for _, r := range rows {
		_, _ = fmt.Fprint(s.out, line(r))
	}
}
