//go:build race

package resolver

// raced: less is inlined then, and what would stay on the stack escapes.
const raced = true
