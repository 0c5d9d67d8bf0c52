package config

import (
	"bytes"
	"errors"
	"io"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// parseYAML returns the one document in data, a mapping; nil when there is none
// or it is empty, or with what is wrong with data as a whole.
func parseYAML(file string, data []byte) (*yaml.Node, Problems) {
	docs, err := documents(data)
	p := Problem{File: file}
	switch {
	case err != nil:
		line, exact := brokenLine(data)
		p.Line, p.Wrong = line, "the file is not YAML: "+withoutLine(err)
		if !exact {
			p.Wrong = "the file is not YAML, here or above: " + withoutLine(err)
		}
	case len(docs) > 1:
		p.Line, p.Wrong, p.Allowed = docs[1].Line, "the file has a second document", "one"
	case len(docs) == 0 || docs[0].Kind == yaml.ScalarNode && docs[0].Tag == tagNull:
		return nil, nil
	case docs[0].Kind != yaml.MappingNode:
		p.Line, p.Wrong, p.Allowed = docs[0].Line, "the file "+describe(docs[0]), keys(new(Config)).allowed()
	default:
		return docs[0], nil
	}
	return nil, Problems{p}
}

// documents returns the root nodes of the documents in data.
func documents(data []byte) ([]*yaml.Node, error) {
	var roots []*yaml.Node
	for dec := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var doc yaml.Node
		switch err := dec.Decode(&doc); {
		case errors.Is(err, io.EOF):
			return roots, nil
		case err != nil:
			return nil, err
		}
		roots = append(roots, doc.Content...)
	}
}

// brokenWork bounds the bytes that brokenLine parses, to a fraction of a second:
// enough for any file of five hundred lines of sixty characters.
const brokenWork = 8 << 20

// brokenLine returns the line on which data stops being YAML. The parser itself
// often names the line before, the one on which the block around began, or
// none. But the longest run of whole lines from the top that it can parse ends
// right above the trouble: above a wrong indentation, a tab, and also above the
// quote or bracket that is never closed. Not exact means that the search was
// given up there on its way to the top.
func brokenLine(data []byte) (line int, exact bool) {
	end := len(data)
	for work := 0; end > 0 && !exact && work < brokenWork; work += end {
		end = bytes.LastIndexByte(data[:end-1], '\n') + 1
		_, err := documents(data[:end])
		exact = err == nil
	}
	return bytes.Count(data[:end], []byte("\n")) + 1, exact
}

// withoutLine returns the parser's words alone.
func withoutLine(err error) string {
	return regexp.MustCompile(`^yaml: (line \d+: )?`).ReplaceAllString(err.Error(), "")
}
