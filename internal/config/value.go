package config

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A value is one place in a Config together with how it is written.
type value interface {
	// decode sets the place from n, or tells d what is wrong and leaves it.
	decode(d *decoder, n *yaml.Node, path string)
	// encode returns the place's content as it would be written in a file.
	encode() *yaml.Node
	// allowed says what may be written, for messages and the reference.
	allowed() string
}

// The types that YAML itself tells apart.
const (
	tagAny    = "" // a word of the command line, where everything is text
	tagText   = "!!str"
	tagNumber = "!!int"
	tagBool   = "!!bool"
	tagNull   = "!!null"
	tagFloat  = "!!float"
)

// A scalar is one word.
type scalar[T any] struct {
	at     *T
	tags   []string                 // what it is to YAML when it is in a file
	parse  func(string) (T, string) // the string says what is wrong, "" for nothing
	format func(T) string
	want   string
}

func (s scalar[T]) decode(d *decoder, n *yaml.Node, path string) {
	if n.Kind != yaml.ScalarNode || n.Tag != tagAny && !slices.Contains(s.tags, n.Tag) {
		d.problem(n, path, describe(n), s.want)
		return
	}
	v, wrong := s.parse(n.Value)
	if wrong != "" {
		d.problem(n, path, quote(n.Value)+" "+wrong, s.want)
		return
	}
	*s.at = v
}

func (s scalar[T]) encode() *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: s.tags[0], Value: s.format(*s.at)}
}

func (s scalar[T]) allowed() string { return s.want }

// A list is any number of values of one kind, each given once.
type list[T any] struct {
	at      *[]T
	element func(*T) value
	fresh   T    // what an element holds before it is decoded
	needs   bool // an empty list is wrong
	inline  bool // as a flag it is written as YAML, not separated by commas
}

func (l list[T]) decode(d *decoder, n *yaml.Node, path string) {
	if n.Kind != yaml.SequenceNode {
		d.problem(n, path, describe(n), l.allowed())
		return
	}
	if l.needs && len(n.Content) == 0 {
		d.problem(n, path, "is empty", l.allowed())
		return
	}
	var out []T
	first := make(map[string]string)
	for i, c := range n.Content {
		item := l.fresh
		v := l.element(&item)
		at := element(path, i)
		d.decode(v, c, at)
		if same := v.encode(); same.Kind == yaml.ScalarNode && d.sound(at) {
			if other, ok := first[same.Value]; ok {
				d.problem(c, at, quote(c.Value)+" is the same as "+other, "each once")
			}
			first[same.Value] = at
		}
		out = append(out, item)
	}
	*l.at = out
}

func (l list[T]) encode() *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
	for i := range *l.at {
		n.Content = append(n.Content, l.element(&(*l.at)[i]).encode())
	}
	return n
}

func (l list[T]) allowed() string {
	entries := "a list"
	if l.needs {
		entries = "a list of at least one entry"
	}
	return entries + ", each " + l.element(new(T)).allowed()
}

// A mapping is a fixed set of named values.
type mapping []key

// A key is one entry of a mapping.
type key struct {
	name    string
	value   value
	meaning string // Markdown, for the reference and, without the backquotes, for --help
	// otherwise says what holds when the key is left out, where that is not one
	// value.
	otherwise string
	required  bool
}

func (m mapping) decode(d *decoder, n *yaml.Node, path string) {
	if n.Kind != yaml.MappingNode {
		d.problem(n, path, describe(n), m.allowed())
		return
	}
	given := make(map[string]int)
	for name, v := range pairs(n) {
		at := join(path, readable(name.Value))
		i := slices.IndexFunc(m, func(k key) bool { return name.Kind == yaml.ScalarNode && k.name == name.Value })
		switch line, doubled := given[name.Value]; {
		case i < 0:
			d.unknown(name, path, m)
		case doubled:
			d.problem(name, at, d.doubled(line), "each key once")
		default:
			given[name.Value] = name.Line
			d.decode(m[i].value, v, at)
		}
	}
	for _, k := range m {
		if _, ok := given[k.name]; k.required && !ok {
			d.problem(n, join(path, k.name), "is missing", k.value.allowed())
		}
	}
}

func (m mapping) encode() *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, k := range m {
		name := &yaml.Node{Kind: yaml.ScalarNode, Tag: tagText, Value: k.name}
		n.Content = append(n.Content, name, k.value.encode())
	}
	return n
}

func (m mapping) allowed() string { return "a mapping with the keys " + m.names() }

func (m mapping) names() string {
	names := make([]string, len(m))
	for i, k := range m {
		names[i] = k.name
	}
	return strings.Join(names, ", ")
}

// leaves calls f with each key below m that holds no mapping of its own, with
// its dotted path. These are the keys that have a flag.
func (m mapping) leaves(f func(path string, k key)) { m.walk("", f) }

func (m mapping) walk(path string, f func(path string, k key)) {
	for _, k := range m {
		at := join(path, k.name)
		if inner, ok := k.value.(mapping); ok {
			inner.walk(at, f)
			continue
		}
		f(at, k)
	}
}

// element returns the path of a list's entry.
func element(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
