//go:build race

package iptables

// slack is by how much time limits of tests are stretched, and loads divided.
const slack = 5
