//go:build !race

package iptables

// slack is by how much time limits of tests are stretched, and loads divided:
// the race detector slows processes down several times.
const slack = 1
