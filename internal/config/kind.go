package config

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The longest lifetimes that the RFCs on caching find sensible.
const (
	maxPositive = 7 * 24 * time.Hour // RFC 8767 section 4
	maxNegative = 24 * time.Hour     // RFC 2308 section 5: beyond a day it proved problematic
	maxStale    = 3 * 24 * time.Hour // RFC 8767 section 5
)

// Bounds of the timeouts. glibc and musl ask again after 5 s: an answer must
// have arrived before.
const (
	minTimeout = 10 * time.Millisecond
	maxTimeout = 4500 * time.Millisecond
)

func text(at *string, parse func(string) (string, string), want string) value {
	return scalar[string]{
		at: at, tags: []string{tagText}, parse: parse, want: want,
		format: func(s string) string { return s },
	}
}

func stringer[T fmt.Stringer](at *T, parse func(string) (T, string), want string, tags ...string) value {
	return scalar[T]{at: at, tags: tags, parse: parse, want: want, format: T.String}
}

func boolean(at *bool) value {
	return scalar[bool]{
		at: at, tags: []string{tagBool}, want: "true or false", format: strconv.FormatBool,
		parse: func(text string) (bool, string) {
			switch text {
			case "true", "True", "TRUE":
				return true, ""
			case "false", "False", "FALSE":
				return false, ""
			}
			return false, "is not a boolean"
		},
	}
}

func enum[T ~string](at *T, all ...T) value {
	return scalar[T]{
		at: at, tags: []string{tagText}, want: oneOf(all),
		format: func(v T) string { return string(v) },
		parse: func(text string) (T, string) {
			if v := T(text); slices.Contains(all, v) {
				return v, ""
			}
			return "", "is unknown"
		},
	}
}

func oneOf[T ~string](all []T) string {
	words := make([]string, len(all))
	for i, v := range all {
		words[i] = string(v)
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

type integer interface{ ~int | ~uint16 | ~uint32 }

func number[T integer](at *T, low, high T) value {
	return scalar[T]{
		at: at, tags: []string{tagNumber}, format: formatNumber[T],
		want: fmt.Sprintf("a whole number from %d to %d", low, high),
		parse: func(text string) (T, string) {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return 0, "is not a whole number"
			}
			return T(n), outside(n, int64(low), int64(high))
		},
	}
}

func formatNumber[T integer](n T) string { return strconv.FormatInt(int64(n), 10) }

// outside says where n lies if it is not between low and high.
func outside[T ~int64](n, low, high T) string {
	switch {
	case n < low:
		return "is too small"
	case n > high:
		return "is too large"
	}
	return ""
}

// parseTable reads the number of a routing table that is nobody's: 253 to 255
// are default, main and local (rtnetlink.h, RT_TABLE_*), 0 is none at all.
func parseTable(text string) (uint32, string) {
	n, err := strconv.ParseUint(text, 10, 32)
	switch {
	case err != nil:
		return 0, "is not a 32-bit number"
	case n == 0:
		return 0, "is no table"
	case 253 <= n && n <= 255:
		return 0, "is a table of the system"
	}
	return uint32(n), ""
}

func size(at *ByteSize, low, high ByteSize) value {
	return stringer(at, func(text string) (ByteSize, string) {
		n, wrong := parseByteSize(text)
		if wrong == "" {
			wrong = outside(n, low, high)
		}
		return n, wrong
	}, fmt.Sprintf("a number of bytes, or of Ki, Mi or Gi, from %v to %v", low, high), tagText, tagNumber)
}

func duration(at *time.Duration, low, high time.Duration) scalar[time.Duration] {
	return scalar[time.Duration]{
		at: at, tags: []string{tagText}, format: formatDuration,
		want: fmt.Sprintf("a duration from %s to %s", formatDuration(low), formatDuration(high)),
		parse: func(text string) (time.Duration, string) {
			d, wrong := parseDuration(text)
			if wrong == "" {
				wrong = outside(d, low, high)
			}
			return d, wrong
		},
	}
}

func timeout(at *time.Duration) scalar[time.Duration] { return duration(at, minTimeout, maxTimeout) }

const hedgeAuto = "auto"

// hedge is a timeout or the word auto, which is 0.
func hedge(at *time.Duration) value {
	fixed := timeout(at)
	return scalar[time.Duration]{
		at: at, tags: []string{tagText}, format: formatHedge,
		want: hedgeAuto + ", or " + fixed.want,
		parse: func(text string) (time.Duration, string) {
			if text == hedgeAuto {
				return 0, ""
			}
			return fixed.parse(text)
		},
	}
}

func formatHedge(d time.Duration) string {
	if d == 0 {
		return hedgeAuto
	}
	return formatDuration(d)
}

func logLevel(at *slog.Level) value {
	levels := []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError}
	words := make([]string, len(levels))
	for i, l := range levels {
		words[i] = strings.ToLower(l.String())
	}
	return scalar[slog.Level]{
		at: at, tags: []string{tagText}, want: oneOf(words),
		format: func(l slog.Level) string { return strings.ToLower(l.String()) },
		parse: func(text string) (slog.Level, string) {
			if i := slices.Index(words, text); i >= 0 {
				return levels[i], ""
			}
			return 0, "is unknown"
		},
	}
}

const wantDomain = "a domain name, . for the root"

func domain(at *string) value { return text(at, parseDomain, wantDomain) }

func subdomain(at *string) value {
	return text(at, parseSubdomain, "a domain name below the root, such as "+defaultClusterDomain)
}

func serviceName(at *ServiceName) value {
	return stringer(at, parseServiceName, "namespace/name, such as kube-system/kube-dns", tagText)
}

func rrType(at *RRType) value {
	var names []string
	for _, n := range rrTypeNames() {
		names = append(names, n.name)
	}
	return stringer(at, parseRRType, oneOf(names), tagText)
}

func mark(at *Mark) value {
	return stringer(at, parseMark, "a number with exactly two bits set, neither of them 0x4000 or 0x8000, such as 0x30", tagNumber)
}

func prefix(at *netip.Prefix) value {
	return stringer(at, parsePrefix, "a CIDR such as 10.0.0.0/8 or fd00::/8, or one IP address", tagText)
}

func server(at *Server) value {
	return stringer(at, parseServer, "service, an absolute path, or IP[:port]", tagText)
}

func address(at *netip.AddrPort) value {
	return stringer(at, parseAddrPort, "IP[:port], such as 169.254.20.10, 127.0.0.1:5353 or [fd53:dd:20::10]:53", tagText)
}
