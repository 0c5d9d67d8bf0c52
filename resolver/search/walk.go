package search

import (
	"bytes"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// Walk is the sequence of names that a client goes through for one name. It
// refers to the List and the qname that it was planned from.
type Walk struct {
	list *List
	base []byte // labels that the client began with, without the root octet
	// expand: the name as it is comes first, and is the queried one;
	// otherwise it comes last.
	expand bool
}

// Collapse plans the rest of the walk whose first step is qname, a folded
// wire-form name: qname is a base of 1 to ndots-1 dots with the first domain
// of the list behind it. A base with ndots dots or more would have been asked
// as it is first; a base of one label is nearly always a Service of the
// client's own namespace, and its walk ends at once.
//
// Only where the first domain is a namespace's: nobody has names of two labels or
// more in there but a Service's pods. Of a list that begins with corp.example, the
// first step of a search for db1.prod cannot be told from the whole name of a host
// db1.prod.corp.example, whose clients, while it is away, must not hear of db1.prod.
func Collapse(l *List, qname []byte) (Walk, bool) {
	w, ok := Listed(l, qname)
	return w, ok && labels(w.base)-1 < l.NDots
}

// Listed is Collapse for bases of any number of dots from 1 on: with ndots dots
// or more, glibc asks qname when it has asked the base as it is, and goes on
// with the list.
func Listed(l *List, qname []byte) (Walk, bool) {
	if l == nil || !l.namespaced {
		return Walk{}, false
	}
	base, ok := trimDomain(qname, l.Domains[0])
	if !ok || labels(base) < 2 {
		return Walk{}, false
	}
	return Walk{list: l, base: base}, true
}

// Expand plans the walk for a client that has not walked itself: qname, a
// folded wire-form name with fewer than ndots dots, as it is, then with every
// domain of the list. Only for lists that ask for it, and not for a name in one
// of their domains: that is whole, or a step of a client that walks after all, for
// which each step would become a walk.
func Expand(l *List, qname []byte) (Walk, bool) {
	if l == nil || !l.Expand || len(qname) < 2 {
		return Walk{}, false
	}
	base := qname[:len(qname)-1]
	if labels(base)-1 >= l.NDots {
		return Walk{}, false
	}
	for _, d := range l.Domains {
		if _, ok := trimDomain(qname, d); ok {
			return Walk{}, false
		}
	}
	return Walk{list: l, base: base, expand: true}, true
}

// ServiceAbove appends the name of the Service that the queried name of a walk is
// a pod of, if it is not a step of a search but a pod's own name: two labels in a
// namespace of the cluster (Kubernetes DNS specification, section 2.4). It returns
// nil for others.
func (p *Policy) ServiceAbove(dst []byte, w *Walk) []byte {
	if w.expand || labels(w.base) != 2 {
		return nil
	}
	domain := w.list.Domains[0]
	if !p.ofNamespace(domain) {
		return nil
	}
	return append(append(dst, w.base[1+int(w.base[0]):]...), domain...)
}

// InCluster reports whether a folded wire-form name is in the cluster's zone.
func (p *Policy) InCluster(name []byte) bool { return dnswire.IsSubdomain(name, p.cluster) }

// trimDomain returns the labels of name before domain.
func trimDomain(name, domain []byte) ([]byte, bool) {
	n := len(name) - len(domain)
	if n < 1 || !bytes.Equal(name[n:], domain) {
		return nil, false
	}
	off := 0
	for off < n {
		off += 1 + int(name[off])
	}
	return name[:n], off == n // else the domain begins within a label
}

// labels counts the labels of a base.
func labels(base []byte) int {
	n := 0
	for off := 0; off < len(base); off += 1 + int(base[off]) {
		n++
	}
	return n
}

// Clone returns the walk without a reference to the qname that it was planned
// from.
func (w *Walk) Clone() *Walk {
	c := *w
	c.base = bytes.Clone(w.base)
	return &c
}

// Len returns the number of names in the walk.
func (w *Walk) Len() int { return len(w.list.Domains) + 1 }

// Expands reports whether the walk is one that the client did not begin.
func (w *Walk) Expands() bool { return w.expand }

// List returns the list that is walked.
func (w *Walk) List() *List { return w.list }

// Candidate appends the i-th name of the walk, in folded wire form, to dst.
// The first is the queried name. A name that would be longer than 255 octets
// is none: a libc skips it (ok is false).
func (w *Walk) Candidate(dst []byte, i int) (name []byte, ok bool) {
	domain := root
	switch {
	case w.expand && i > 0:
		domain = w.list.Domains[i-1]
	case !w.expand && i < len(w.list.Domains):
		domain = w.list.Domains[i]
	}
	if len(w.base)+len(domain) > dnswire.MaxNameLen {
		return dst, false
	}
	return append(append(dst, w.base...), domain...), true
}

var root = []byte{0} //nolint:gochecknoglobals // a constant

// State is what is known of a name and a type.
type State uint8

// The states.
const (
	Unknown  State = iota
	Data           // records of the type, at the name or behind its CNAMEs
	NoData         // the name exists, the type does not
	NXDomain       // the name does not exist
	Failed         // no answer, or an error
)

// Step is how a walk goes on from a name.
type Step uint8

// The steps.
const (
	// Ask: ask the name for the type in question.
	Ask Step = iota
	// AskSibling: ask the name for the other address family.
	AskSibling
	// Next: the name does not exist; go on with the next one.
	Next
	// Win: the name is the one. What it has of the type in question, if
	// only NODATA, is the answer.
	Win
	// Stop: libcs disagree on what comes next; the answer is the first
	// name's, and the client goes on by itself.
	Stop
	// Fail: the answer is SERVFAIL.
	Fail
)

// Decide says how a walk goes on from a name, from the states of its two
// address types: own is the one in question. At the last name of a walk the
// type is asked even if the sibling's NXDOMAIN has settled the name: some
// servers outside deny a name for AAAA that has A (RFC 4074 section 4.2), and
// there nothing comes after that could make good for it.
func Decide(own, sibling State, last bool) Step {
	switch own {
	case Data:
		return Win
	case NXDomain:
		if sibling == Data { // such a server: the other family has its answer here
			return Stop
		}
		return Next
	case Failed:
		switch {
		case last:
		case sibling == Unknown: // its NXDOMAIN would settle the name
			return AskSibling
		case sibling == NXDomain:
			return Next
		}
		return Fail
	case NoData:
		switch sibling {
		case Data:
			return Win
		case Unknown:
			return AskSibling
		case Failed:
			return Fail
		}
		return Stop
	}
	switch {
	case sibling == Data:
		return Win
	case sibling == NXDomain && !last:
		return Next
	}
	return Ask
}

// DecideByOther says how a walk goes on from a name of which the type in
// question is known to be missing by policy, from the state of the other
// address type alone.
func DecideByOther(other State) Step {
	switch other {
	case Data:
		return Win
	case NXDomain:
		return Next
	case Failed:
		return Fail
	case NoData:
		return Stop
	}
	return AskSibling
}

// Names appends the names that a client's libc tries for a name, in its order
// (resolv.conf(5)): with fewer than ndots dots the list first and the name as
// it is last, else the other way round. musl does not search at all in the
// latter case. Names are in folded wire form; those that would be too long are
// left out.
func (l *List) Names(dst [][]byte, name []byte) [][]byte {
	base := name[:len(name)-1]
	w := Walk{list: l, base: base, expand: labels(base)-1 >= l.NDots}
	for i := range w.Len() {
		if c, ok := w.Candidate(nil, i); ok {
			dst = append(dst, c)
		}
	}
	return dst
}

// WireName packs a name in presentation form, relative or absolute, in folded
// wire form.
func WireName(name string) ([]byte, error) { return wireName(name) }
