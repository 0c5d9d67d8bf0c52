package config

import (
	"strings"
	"testing"
)

// TestNotYAML holds the line of a syntax error, for the kinds of which the
// parser itself names another line or none.
func TestNotYAML(t *testing.T) {
	tests := []struct {
		name string
		file string
		want string
	}{
		{
			"first line", "{\n",
			`f.yaml:1: the file is not YAML: did not find expected node content`,
		},
		{
			"list that is not closed", "http: ':80'\nlisten: [10.0.0.1\naaaa: pass\n",
			`f.yaml:2: the file is not YAML: did not find expected ',' or ']'`,
		},
		{
			"quote that is not closed", "http: ':80'\n\ncontrol: \"/run\naaaa: pass\n",
			`f.yaml:3: the file is not YAML: found unexpected end of stream`,
		},
		{
			"list over several lines before the error", "listen: [\n  10.0.0.1,\n]\naaaa: pass\nlog: }\n",
			`f.yaml:5: the file is not YAML: did not find expected node content`,
		},
		{
			"tab", "cache:\n  size: 8Mi\n\tprefetch: true\n",
			`f.yaml:3: the file is not YAML: found a tab character that violates indentation`,
		},
		{
			"indentation", "cache:\n    size: 8Mi\n  prefetch: true\naaaa: pass\n",
			`f.yaml:3: the file is not YAML: did not find expected key`,
		},
		{
			"alias of nothing", "aaaa: pass\nhttp: *x\n",
			`f.yaml:2: the file is not YAML: unknown anchor 'x' referenced`,
		},
		{
			"bytes that are no text", "aaaa: pass\nhttp: \xff\n",
			`f.yaml:2: the file is not YAML: invalid leading UTF-8 octet`,
		},
		{
			"control character", "aaaa: pass\nhttp: \x01\n",
			`f.yaml:2: the file is not YAML: control characters are not allowed`,
		},
		{
			"no line break at the end", "aaaa: pass\nhttp: [",
			`f.yaml:2: the file is not YAML: did not find expected node content`,
		},
		{
			"two documents", "aaaa: pass\n---\naaaa: nodata\n",
			`f.yaml:3: the file has a second document, allowed: one`,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(test.file), nil)
			if err == nil || err.Error() != test.want {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
		})
	}
}

// TestNotYAMLAtLength shows the bound on the search for the line: a large file
// whose first line is wrong gets an answer soon, and one that says that it is
// not exact.
func TestNotYAMLAtLength(t *testing.T) {
	file := "listen: [\n" + strings.Repeat("# some sixty bytes of a comment that nobody will ever read\n", 16000)
	_, err := Parse("f.yaml", []byte(file), nil)
	if err == nil || !strings.Contains(err.Error(), ": the file is not YAML, here or above: ") {
		t.Errorf("got %v, want no exact line", err)
	}
}
