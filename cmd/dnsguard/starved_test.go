package main

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestStarvation: when queries are left to kube-proxy since no socket can be
// opened, and when they are taken again.
func TestStarvation(t *testing.T) {
	type look struct {
		err      error
		answered uint64
		leave    bool
	}
	tests := map[string][]look{
		"never":                         {{nil, 5, false}, {nil, 5, false}, {nil, 5, false}},
		"once is no reason":             {{unix.EMFILE, 5, false}, {nil, 5, false}, {unix.EMFILE, 5, false}},
		"twice is":                      {{nil, 5, false}, {unix.EMFILE, 5, false}, {unix.EMFILE, 5, true}, {unix.EMFILE, 5, true}, {nil, 5, false}},
		"open sockets are answered":     {{nil, 5, false}, {unix.ENFILE, 6, false}, {unix.ENFILE, 7, false}, {unix.ENFILE, 8, false}},
		"… and then not any more":       {{nil, 5, false}, {unix.ENFILE, 6, false}, {unix.ENFILE, 6, false}, {unix.ENFILE, 6, true}},
		"a late answer does not retake": {{nil, 5, false}, {unix.EMFILE, 5, false}, {unix.EMFILE, 5, true}, {unix.EMFILE, 6, true}, {nil, 6, false}},
	}
	for name, looks := range tests {
		t.Run(name, func(t *testing.T) {
			s := starvation{answered: 5}
			for n, l := range looks {
				if got := s.look(l.err, l.answered); got != l.leave {
					t.Errorf("look %d: leave %t, want %t", n, got, l.leave)
				}
			}
		})
	}
}
