package config

import (
	"slices"
	"strings"
)

// hint says which key was probably meant by name, which is none of m's at path:
// a near miss there, else one of that name elsewhere. "" is no idea.
func (d *decoder) hint(name, path string, m mapping) string {
	near, best := "", 0
	for _, k := range m {
		n := distance(strings.ToLower(name), strings.ToLower(k.name))
		if n <= slip(k.name) && (near == "" || n < best) {
			near, best = k.name, n
		}
	}
	if near != "" {
		return "did you mean " + join(path, near) + "?"
	}
	var elsewhere []string
	nested := ""
	d.schema.leaves(func(at string, _ key) {
		if strings.HasSuffix(at, "."+name) {
			elsewhere = append(elsewhere, at)
		}
		if section, k, ok := strings.Cut(at, "."); ok && at == name {
			nested = section + ": {" + k + ": ...}"
		}
	})
	switch {
	case nested != "":
		return "that is the flag; in a file it is " + nested
	case len(elsewhere) > 0:
		return "did you mean " + strings.Join(elsewhere, " or ") + "?"
	}
	return ""
}

// slip is how many typing errors still make a name recognisable.
func slip(name string) int { return min(2, len(name)/3) }

// distance counts the insertions, deletions, substitutions and swaps of
// neighbours that lie between two words (optimal string alignment).
func distance(a, b string) int {
	before, above, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range above {
		above[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = slices.Min([]int{above[j+1] + 1, row[j] + 1, above[j] + cost})
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, above, row = above, row, before
	}
	return above[len(b)]
}
