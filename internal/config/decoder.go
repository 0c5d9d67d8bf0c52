package config

import (
	"fmt"
	"iter"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A decoder reads sources, one after the other, into a Config. It remembers
// where each key was given, so that a check that finds two keys at odds can say
// which of them the operator wrote, and where.
type decoder struct {
	schema   mapping
	file     string // "" where there is none
	flag     bool   // the source being read is the command line
	origins  map[string]origin
	wrong    map[string]bool // keys that something is wrong with
	inside   map[string]bool // keys that have one of these inside
	problems Problems
}

// An origin is where a key was given last.
type origin struct {
	flag bool
	line int
}

func newDecoder(schema mapping, file string) *decoder {
	return &decoder{
		schema:  schema,
		file:    file,
		origins: make(map[string]origin),
		wrong:   make(map[string]bool),
		inside:  make(map[string]bool),
	}
}

// decode is v.decode with the key's origin recorded.
func (d *decoder) decode(v value, n *yaml.Node, path string) {
	d.origins[path] = origin{flag: d.flag, line: n.Line}
	v.decode(d, n, path)
}

// problem records what is wrong at n.
func (d *decoder) problem(n *yaml.Node, path, wrong, allowed string) {
	d.report(origin{flag: d.flag, line: n.Line}, path, wrong, allowed)
}

func (d *decoder) report(o origin, path, wrong, allowed string) {
	p := Problem{Flag: o.flag, Key: path, Wrong: wrong, Allowed: allowed}
	if !o.flag {
		p.File, p.Line = d.file, o.line
	}
	d.problems = append(d.problems, p)
	d.wrong[path] = true
	for path = around(path); path != ""; path = around(path) {
		d.inside[path] = true
	}
}

// sound reports whether nothing is wrong with the keys, inside them or with
// what they are in.
func (d *decoder) sound(paths ...string) bool {
	for _, path := range paths {
		if d.inside[path] {
			return false
		}
		for ; path != ""; path = around(path) {
			if d.wrong[path] {
				return false
			}
		}
	}
	return true
}

// origin returns where path was given or, if it holds a default, the key around
// it.
func (d *decoder) origin(path string) origin {
	for ; path != ""; path = around(path) {
		if o, ok := d.origins[path]; ok {
			return o
		}
	}
	return origin{}
}

// given reports whether path itself was given.
func (d *decoder) given(path string) bool {
	_, ok := d.origins[path]
	return ok
}

// refuse records that the key at path cannot hold beside what the other keys
// say, unless one of them is wrong already.
func (d *decoder) refuse(wrong, allowed, path string, others ...string) {
	if d.sound(path) && d.sound(others...) {
		d.report(d.origin(path), path, wrong, allowed)
	}
}

// conflict is refuse for two keys of which either may be to blame. It is told
// at the one that was given, the one given last if both were: flags come after
// the file.
func (d *decoder) conflict(a, b side) {
	if !d.sound(a.path, b.path) {
		return
	}
	ofA, givenA := d.origins[a.path]
	ofB, givenB := d.origins[b.path]
	if !givenA || givenB && ofB.flag && !ofA.flag {
		a, ofA = b, ofB
	}
	d.report(ofA, a.path, a.wrong, a.allowed)
}

// A side is what to say about one of two keys.
type side struct{ path, wrong, allowed string }

// forget drops the origins of path and what is inside it: another source
// replaces it.
func (d *decoder) forget(path string) {
	for at := range d.origins {
		if rest, ok := strings.CutPrefix(at, path); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			delete(d.origins, at)
		}
	}
}

// around returns the path of the key that holds the one at path.
func around(path string) string {
	return path[:max(0, strings.LastIndexAny(path, ".["))]
}

// unknown records that m, which stands at path, has no key of that name.
func (d *decoder) unknown(name *yaml.Node, path string, m mapping) {
	if name.Kind != yaml.ScalarNode {
		d.problem(name, path, "has a key that "+describe(name), m.allowed())
		return
	}
	wrong := "unknown key"
	if hint := d.hint(name.Value, path, m); hint != "" {
		wrong += " (" + hint + ")"
	}
	d.problem(name, join(path, readable(name.Value)), wrong, "one of "+m.names())
}

// pairs walks the entries of a mapping node.
func pairs(n *yaml.Node) iter.Seq2[*yaml.Node, *yaml.Node] {
	return func(yield func(name, value *yaml.Node) bool) {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if !yield(n.Content[i], n.Content[i+1]) {
				return
			}
		}
	}
}

// describe says what n is, where something else was wanted.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "is a mapping"
	case yaml.SequenceNode:
		return "is a list"
	case yaml.AliasNode:
		// Aliases would let a few bytes become a huge configuration.
		return fmt.Sprintf("is the alias *%s: write the value out", readable(n.Value))
	}
	switch n.Tag {
	case tagNull:
		return "has no value"
	case tagText, tagAny:
		return "is the text " + quote(n.Value)
	case tagBool:
		return "is the boolean " + readable(n.Value)
	case tagNumber, tagFloat:
		return "is the number " + readable(n.Value)
	}
	return fmt.Sprintf("is %s of type %s", quote(n.Value), readable(n.Tag))
}

// doubled says of a key that it was there before.
func (d *decoder) doubled(line int) string {
	if d.flag {
		return "doubled key"
	}
	return fmt.Sprintf("doubled key (first on line %d)", line)
}

// readable returns text as it is if it stands out from a sentence and cannot
// break the line, quoted otherwise.
func readable(text string) string {
	if text == "" || len(text) > maxQuoted || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ':' || r == '"' }) {
		return quote(text)
	}
	return text
}

// maxQuoted keeps a message readable whatever the file holds.
const maxQuoted = 80

// quote returns the text, or its beginning, in quotes.
func quote(text string) string {
	if len(text) > maxQuoted {
		return strconv.Quote(text[:maxQuoted]) + "..."
	}
	return strconv.Quote(text)
}
