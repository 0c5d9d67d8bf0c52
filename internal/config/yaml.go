package config

import (
	"bytes"
	"errors"
	"io"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// parseYAML returns the one document in data, nil when there is none or it is
// empty. What is wrong with data as YAML is told to d.
func (d *decoder) parseYAML(data []byte) *yaml.Node {
	docs, err := documents(data)
	switch {
	case err != nil:
		d.report(origin{line: brokenLine(data)}, "", "is not YAML: "+withoutLine(err), "")
		return nil
	case len(docs) > 1:
		d.problem(docs[1], "", "is a second document", "one document")
		return nil
	case len(docs) == 0 || docs[0].Kind == yaml.ScalarNode && docs[0].Tag == tagNull:
		return nil
	}
	return docs[0]
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

// brokenWork bounds the bytes that brokenLine parses, to about a second. It is
// exact for any file of up to a thousand lines of 60 characters.
const brokenWork = 32 << 20

// brokenLine returns the line on which data stops being YAML. The parser itself
// often names the line before, the one on which the block around began, or
// none. But the longest run of whole lines from the top that it can parse ends
// right above the trouble: above a wrong indentation, a tab, and also above the
// quote or bracket that is never closed.
func brokenLine(data []byte) int {
	end := len(data)
	for work := 0; end > 0 && work < brokenWork; work += end {
		end = bytes.LastIndexByte(data[:end-1], '\n') + 1
		if _, err := documents(data[:end]); err == nil {
			break
		}
	}
	return bytes.Count(data[:end], []byte("\n")) + 1
}

// withoutLine returns the parser's words alone.
func withoutLine(err error) string {
	return regexp.MustCompile(`^yaml: (line \d+: )?`).ReplaceAllString(err.Error(), "")
}
