package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	kjson "sigs.k8s.io/json"
)

// document is one YAML document of a file: a Kubernetes object.
type document struct {
	number   int
	root     *yaml.Node
	title    string // kind and name, as far as they are known
	problems []error
}

// wrong notes what is wrong with what the path leads to.
func (d *document) wrong(path, format string, args ...any) {
	d.wrongAt(d.line(path), path, format, args...)
}

func (d *document) wrongAt(line int, path, format string, args ...any) {
	where := []string{fmt.Sprintf("document %d, line %d", d.number, line)}
	for _, more := range []string{d.title, path} {
		if more != "" {
			where = append(where, more)
		}
	}
	d.problems = append(d.problems, fmt.Errorf("%s: %s", strings.Join(where, ": "), fmt.Sprintf(format, args...)))
}

// text returns the text of a key of the document, or "".
func (d *document) text(key string) string {
	if n := child(d.root, key); n != nil && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

// line returns the line of what a path such as spec.ports[0].name leads to, or
// of the last node on the way that is there.
func (d *document) line(path string) int {
	n := d.root
	for _, step := range regexp.MustCompile(`[^.[\]]+`).FindAllString(path, -1) {
		next := child(n, step)
		if next == nil {
			break
		}
		n = next
	}
	return n.Line
}

// child returns a node's child by key, the last one of several, or by index.
func child(n *yaml.Node, step string) (found *yaml.Node) {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == step {
				found = n.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i]
		}
	}
	return found
}

// into reads the document into an object of the API, as strictly as kubectl
// does with --validate=strict, and tells whether it could. Objects can be read
// from JSON only: that is what the document is turned into, each value on the
// line where it stands in the file.
func (d *document) into(object any) bool {
	text := &jsonText{line: d.root.Line}
	text.value(d.root)
	if text.wrong != nil {
		d.wrongAt(text.wrong.Line, "", "%s", text.why)
		return false
	}
	strict, err := kjson.UnmarshalStrict(text.buf, object)
	if err != nil {
		d.mistyped(text.buf, object, err)
		return false
	}
	for _, err := range strict {
		path, what := "", err.Error()
		if f := kjson.FieldError(nil); errors.As(err, &f) {
			path = f.FieldPath()
			what, _, _ = strings.Cut(what, ` "`)
		}
		d.wrong(path, "%s", what)
	}
	return len(strict) == 0
}

// mistyped notes why the text cannot be read. The library does not tell where;
// the standard one, which it is made from, does.
func (d *document) mistyped(text []byte, object any, err error) {
	var t *json.UnmarshalTypeError
	again := reflect.New(reflect.TypeOf(object).Elem()).Interface()
	if !errors.As(json.Unmarshal(text, again), &t) {
		d.wrong("", "%v", err)
		return
	}
	line := d.root.Line + bytes.Count(text[:min(int(t.Offset), len(text))], []byte("\n"))
	d.wrongAt(line, t.Field, "is %s, want %s", jsonWord(t.Value), kindWord(t.Type.Kind()))
}

func jsonWord(value string) string {
	switch value {
	case "array":
		return "a list"
	case "object":
		return "a mapping"
	case "string":
		return "text"
	case "bool":
		return "true or false"
	}
	return value
}

func kindWord(k reflect.Kind) string {
	switch k {
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a mapping"
	case reflect.String:
		return "text (in quotes)"
	case reflect.Bool:
		return "true or false"
	}
	return "a number that fits into " + k.String()
}

// jsonText is a YAML node as JSON, each value on its line.
type jsonText struct {
	buf   []byte
	line  int
	wrong *yaml.Node // the first that cannot be had in JSON
	why   string
}

func (t *jsonText) value(n *yaml.Node) {
	for ; t.line < n.Line; t.line++ {
		t.buf = append(t.buf, '\n')
	}
	switch n.Kind {
	case yaml.MappingNode:
		t.put('{')
		for i := 0; i+1 < len(n.Content); i += 2 {
			if i > 0 {
				t.put(',')
			}
			t.key(n.Content[i])
			t.put(':')
			t.value(n.Content[i+1])
		}
		t.put('}')
	case yaml.SequenceNode:
		t.put('[')
		for i, c := range n.Content {
			if i > 0 {
				t.put(',')
			}
			t.value(c)
		}
		t.put(']')
	case yaml.ScalarNode:
		t.scalar(n)
	default:
		t.refuse(n, "an alias: write out what it stands for")
	}
}

func (t *jsonText) put(c byte) { t.buf = append(t.buf, c) }

func (t *jsonText) key(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode {
		t.refuse(n, "a key that is no text")
		return
	}
	t.marshal(n, n.Value)
}

func (t *jsonText) scalar(n *yaml.Node) {
	var v any
	switch tag := n.ShortTag(); tag {
	case "!!str", "!!timestamp":
		v = n.Value
	case "!!null", "!!bool", "!!int", "!!float":
		if err := n.Decode(&v); err != nil {
			t.refuse(n, err.Error())
			return
		}
	default:
		t.refuse(n, "a value with the tag "+tag)
		return
	}
	t.marshal(n, v)
}

func (t *jsonText) marshal(n *yaml.Node, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		t.refuse(n, err.Error()) // infinite numbers
		return
	}
	t.buf = append(t.buf, b...)
}

func (t *jsonText) refuse(n *yaml.Node, why string) {
	if t.wrong == nil {
		t.wrong, t.why = n, why
	}
}
