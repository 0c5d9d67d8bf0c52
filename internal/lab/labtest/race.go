//go:build race

package labtest

const race = true
