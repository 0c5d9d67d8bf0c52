package config

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// A Problem is one thing that is wrong with the configuration, in words for an
// operator.
type Problem struct {
	File    string // where the key stands; empty for a flag
	Line    int    // in File, from 1; 0 for a flag
	Flag    bool   // the key was given as a flag
	Key     string // dotted path; empty when the file as a whole is meant
	Wrong   string // what is wrong
	Allowed string // what is allowed
}

// String returns the problem on one line:
//
//	FILE:LINE: path.to.key: what is wrong, allowed: what is allowed
//	--path.to.key: what is wrong, allowed: what is allowed
func (p Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		fmt.Fprintf(&b, "%s:%d: ", p.File, p.Line)
	}
	if p.Flag {
		b.WriteString("--")
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Wrong)
	if p.Allowed != "" {
		b.WriteString(", allowed: " + p.Allowed)
	}
	return b.String()
}

// Problems is the error of a configuration that was read and is wrong: all that
// is wrong with it, the file's by line, then the flags' as they were given.
type Problems []Problem

// Error returns the problems, one a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

func (ps Problems) sort() {
	slices.SortStableFunc(ps, func(a, b Problem) int { return cmp.Compare(a.rank(), b.rank()) })
}

// rank is the line, flags last.
func (p Problem) rank() int {
	if p.Flag {
		return math.MaxInt
	}
	return p.Line
}
