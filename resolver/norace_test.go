//go:build !race

package resolver

const raced = false
