package main

import (
	"maps"
	"slices"
	"sync"
)

// conditions are what keeps the daemon from being ready (reasons), and what an
// operator should know although it is (warnings), each under a key of the part
// that says so. onChange is called, if not nil, whenever readiness changes.
type conditions struct {
	onChange func(ready bool, reasons []string)

	mu       sync.Mutex
	reasons  map[string]string
	warnings map[string]string
}

func newConditions(onChange func(bool, []string)) *conditions {
	return &conditions{onChange: onChange, reasons: map[string]string{}, warnings: map[string]string{}}
}

// notReady sets or, with an empty text, clears a reason.
func (c *conditions) notReady(key, text string) {
	c.mu.Lock()
	before := len(c.reasons) == 0
	set(c.reasons, key, text)
	after := len(c.reasons) == 0
	reasons := values(c.reasons)
	c.mu.Unlock()
	if before != after && c.onChange != nil {
		c.onChange(after, reasons)
	}
}

// warn sets or, with an empty text, clears a warning. It reports whether that is
// news.
func (c *conditions) warn(key, text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.warnings[key]
	set(c.warnings, key, text)
	return before != text
}

func set(m map[string]string, key, text string) {
	if text == "" {
		delete(m, key)
		return
	}
	m[key] = text
}

// get returns all reasons and warnings, each sorted by key.
func (c *conditions) get() (reasons, warnings []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return values(c.reasons), values(c.warnings)
}

func values(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+": "+m[k])
	}
	return out
}
