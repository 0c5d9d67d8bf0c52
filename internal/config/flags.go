package config

import (
	"flag"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Flags holds the keys that were given on the command line.
type Flags struct {
	given []setting
}

// A setting is one flag as it was given. It is decoded only when the file has
// been read, so that everything that is wrong comes out at once.
type setting struct {
	key  string
	text string
}

// RegisterFlags defines a flag for every key of the configuration, under its
// dotted name, and returns where fs.Parse will put them.
func RegisterFlags(fs *flag.FlagSet) *Flags {
	flags := new(Flags)
	byDefault := newDefaultTexts(flagText)
	keys(Default()).leaves(func(path string, k key) {
		usage := k.meaning + "\nAllowed: " + flagAllowed(k.value)
		fs.Var(&flagValue{
			flags: flags,
			key:   path,
			bool:  isBool(k.value),
			text:  plain(byDefault.of(path, k)),
		}, path, plain(usage))
	})
	return flags
}

// A flagValue is the flag.Value of one key.
type flagValue struct {
	flags *Flags
	key   string
	bool  bool
	text  string
}

// String returns the text given last, or the default.
func (v *flagValue) String() string { return v.text }

// Set records text. It never fails: see setting.
func (v *flagValue) Set(text string) error {
	v.text = text
	v.flags.given = append(v.flags.given, setting{v.key, text})
	return nil
}

// IsBoolFlag lets --guard.dryRun stand for --guard.dryRun=true.
func (v *flagValue) IsBoolFlag() bool { return v.bool }

func isBool(v value) bool {
	_, ok := v.(scalar[bool])
	return ok
}

// A flagReader is a value that takes all the occurrences of its flag together.
type flagReader interface {
	// fromFlags returns the node that a file would hold.
	fromFlags(texts []string) (*yaml.Node, error)
	// flagAllowed is allowed for a flag.
	flagAllowed() string
}

func flagAllowed(v value) string {
	if together, ok := v.(flagReader); ok {
		return together.flagAllowed()
	}
	return v.allowed()
}

// readFlags decodes the flags in the order in which their keys first appeared.
func (d *decoder) readFlags(flags *Flags) {
	values := make(map[string]value)
	d.schema.leaves(func(path string, k key) { values[path] = k.value })
	texts := make(map[string][]string)
	var order []string
	for _, s := range flags.given {
		if texts[s.key] == nil {
			order = append(order, s.key)
		}
		texts[s.key] = append(texts[s.key], s.text)
	}
	for _, path := range order {
		d.readFlag(values[path], path, texts[path])
	}
}

func (d *decoder) readFlag(v value, path string, texts []string) {
	together, ok := v.(flagReader)
	if !ok {
		// Of a single value the last one holds, as the flag package has it.
		for _, text := range texts {
			d.decode(v, word(text), path)
		}
		return
	}
	n, err := together.fromFlags(texts)
	if err != nil {
		d.problem(&yaml.Node{}, path, "is not YAML: "+withoutLine(err), together.flagAllowed())
		return
	}
	if n.Kind == yaml.SequenceNode {
		d.forget(path)
	}
	d.decode(v, n, path)
}

func word(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagAny, Value: text}
}

func (l list[T]) fromFlags(texts []string) (*yaml.Node, error) {
	all := &yaml.Node{Kind: yaml.SequenceNode}
	for _, text := range texts {
		if !l.inline {
			for item := range strings.SplitSeq(text, ",") {
				if item = strings.TrimSpace(item); text != "" {
					all.Content = append(all.Content, word(item))
				}
			}
			continue
		}
		docs, err := documents([]byte(text))
		if err != nil {
			return nil, err
		}
		for _, n := range docs {
			if n.Kind == yaml.SequenceNode {
				all.Content = append(all.Content, n.Content...)
			} else {
				all.Content = append(all.Content, n)
			}
		}
	}
	return all, nil
}

func (l list[T]) flagAllowed() string {
	if l.inline {
		return "the YAML of an entry or of the list; repeated, one list"
	}
	return "separated by commas or repeated, each " + l.element(new(T)).allowed()
}

func (z zoneCaps) fromFlags(texts []string) (*yaml.Node, error) {
	all := &yaml.Node{Kind: yaml.MappingNode}
	for _, text := range texts {
		docs, err := documents([]byte(text))
		if err != nil {
			return nil, err
		}
		for _, n := range docs {
			if n.Kind != yaml.MappingNode {
				return n, nil // which decode complains about
			}
			all.Content = append(all.Content, n.Content...)
		}
	}
	return all, nil
}

func (z zoneCaps) flagAllowed() string { return "the YAML of the mapping; repeated, one mapping" }

// flagText returns what would be written after the = of a flag.
func flagText(n *yaml.Node) string {
	if n.Kind == yaml.ScalarNode {
		return n.Value
	}
	items := make([]string, len(n.Content))
	for i, c := range n.Content {
		if c.Kind != yaml.ScalarNode || n.Kind != yaml.SequenceNode {
			return flowText(n)
		}
		items[i] = c.Value
	}
	return strings.Join(items, ",")
}

// plain is Markdown without its backquotes, which the flag package would take
// for the name of the flag's operand.
func plain(markdown string) string { return strings.ReplaceAll(markdown, "`", "") }
