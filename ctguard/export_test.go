package ctguard

import "testing"

// NewNamespaceKernel opens the table of a namespace of its own, with a
// function that makes entries.
func NewNamespaceKernel(t testing.TB) (*Kernel, func(...Flow)) {
	n := newNamespace(t)
	return n.kernel(), func(fs ...Flow) { t.Helper(); n.fill(fs) }
}

// KnownFlow is what is kept of a flow between sweeps.
type KnownFlow = knownFlow
