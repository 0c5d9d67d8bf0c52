//go:build race

package main

// raceEnabled tells that the race detector makes everything ten times slower:
// loads are left to the run without it.
const raceEnabled = true
