package config

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// unset stands in a CacheZone for a cap that nobody has given yet.
const unset time.Duration = -1

// zoneCaps is cache.zones: a mapping from zones to caps that is laid over what
// is there.
type zoneCaps struct{ at *[]CacheZone }

func (z zoneCaps) decode(d *decoder, n *yaml.Node, path string) {
	if n.Kind != yaml.MappingNode {
		d.problem(n, path, describe(n), z.allowed())
		return
	}
	given := make(map[string]int)
	for name, v := range pairs(n) {
		at := path + "[" + quote(name.Value) + "]"
		if name.Kind != yaml.ScalarNode {
			d.problem(name, path, describe(name), z.allowed())
			continue
		}
		zone, wrong := parseDomain(name.Value)
		if wrong != "" {
			d.problem(name, at, quote(name.Value)+" "+wrong, wantDomain)
			continue
		}
		if line, doubled := given[zone]; doubled {
			d.problem(name, at, d.doubled(line), "each zone once")
			continue
		}
		given[zone] = name.Line
		d.decode(zoneKeys(z.zone(zone)), v, at)
	}
}

// zone returns the entry for the folded name, a new one if need be.
func (z zoneCaps) zone(name string) *CacheZone {
	i := slices.IndexFunc(*z.at, func(c CacheZone) bool { return c.Name == name })
	if i < 0 {
		i = len(*z.at)
		*z.at = append(*z.at, CacheZone{Name: name, Positive: unset, Negative: unset, Stale: unset})
	}
	return &(*z.at)[i]
}

func (z zoneCaps) encode() *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
	for i := range *z.at {
		c := &(*z.at)[i]
		name := &yaml.Node{Kind: yaml.ScalarNode, Tag: tagText, Value: c.Name}
		n.Content = append(n.Content, name, zoneKeys(c).encode())
	}
	return n
}

func (z zoneCaps) allowed() string {
	return "a mapping from domain names to mappings with the keys " + zoneKeys(new(CacheZone)).names()
}

// inheritCaps gives each cap that is unset the value of the closest enclosing
// zone, and sorts the zones by name so that equal configurations are equal. The
// root is always among them, complete.
func inheritCaps(zones []CacheZone) {
	// Enclosing zones are shorter: they are complete before they are asked.
	slices.SortFunc(zones, func(a, b CacheZone) int { return cmp.Compare(depth(a.Name), depth(b.Name)) })
	for i := range zones {
		z := &zones[i]
		for _, outer := range slices.Backward(zones[:i]) {
			if !isWithin(z.Name, outer.Name) {
				continue
			}
			z.Positive = given(z.Positive, outer.Positive)
			z.Negative = given(z.Negative, outer.Negative)
			z.Stale = given(z.Stale, outer.Stale)
			break
		}
	}
	slices.SortFunc(zones, func(a, b CacheZone) int { return strings.Compare(a.Name, b.Name) })
}

func given(d, otherwise time.Duration) time.Duration {
	if d == unset {
		return otherwise
	}
	return d
}

// depth counts the labels of a folded name.
func depth(name string) int {
	if name == "." {
		return 0
	}
	return 1 + strings.Count(name, ".")
}
