package config

import (
	"fmt"
	"io"
	"os"
	"slices"

	"go.yaml.in/yaml/v3"
)

// maxFile is the size of the largest ConfigMap that Kubernetes takes.
const maxFile = 1 << 20

// Load reads the configuration file at path, lays flags over it (nil is none)
// and returns the whole, checked. With an empty path there is no file, and
// defaults are those of a process outside Kubernetes.
//
// The error is Problems when the configuration is wrong, and another one when
// the file cannot be read.
func Load(path string, flags *Flags) (*Config, error) {
	if path == "" {
		return build("", nil, flags, SourceNone)
	}
	data, err := readFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return Parse(path, data, flags)
}

// Parse is Load for the content of a file. Problems name the file as given.
func Parse(file string, data []byte, flags *Flags) (*Config, error) {
	return build(file, data, flags, SourceAPI)
}

func build(file string, data []byte, flags *Flags, source KubernetesSource) (*Config, error) {
	root, unreadable := parseYAML(file, data)

	// The first reading is for the three keys that the defaults depend on.
	draft := defaults(source, defaultClusterDomain, defaultDNSService())
	newDecoder(keys(draft), file).read(root, flags)

	c := defaults(draft.Kubernetes.Source, draft.ClusterDomain, draft.Kubernetes.DNSService)
	d := newDecoder(keys(c), file)
	d.read(root, flags)
	if unreadable == nil {
		// Checks on half of the keys would complain about the other half.
		c.complete()
		d.check(c)
	}
	if problems := append(unreadable, d.problems...); len(problems) > 0 {
		problems.sort()
		return nil, problems
	}
	return c, nil
}

// read decodes the file's root, if there is one, and then the flags.
func (d *decoder) read(root *yaml.Node, flags *Flags) {
	if root != nil {
		d.schema.decode(d, root, "")
	}
	if flags != nil {
		d.flag = true
		d.readFlags(flags)
		d.flag = false
	}
}

// complete fills in what the zones that were given leave to defaults.
func (c *Config) complete() {
	inheritCaps(c.Cache.Zones)
	if !slices.ContainsFunc(c.Upstreams, func(u Upstream) bool { return slices.Contains(u.Zones, ".") }) {
		c.Upstreams = append(c.Upstreams, rootUpstream(c.Kubernetes.Source))
	}
}

// readFile is os.ReadFile for files that are meant to be small.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: larger than 1 MiB", path)
	}
	return data, nil
}
