//go:build race

package upstream

// raced: sync.Pool then drops a share of what it is given.
const raced = true
