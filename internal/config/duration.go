package config

import (
	"strconv"
	"strings"
	"time"
)

// formatDuration is Duration.String as people write it: 5m instead of 5m0s,
// 1200ms instead of 1.2s.
func formatDuration(d time.Duration) string {
	if d%time.Second != 0 && d%time.Millisecond == 0 && d < time.Minute {
		return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

func parseDuration(text string) (time.Duration, string) {
	d, err := time.ParseDuration(text)
	if err == nil {
		return d, ""
	}
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return 0, "has no unit"
	}
	return 0, "is not a duration"
}
