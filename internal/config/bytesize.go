package config

import (
	"math"
	"strconv"
	"strings"
)

// A ByteSize is a number of bytes. Its text takes the units Ki, Mi and Gi.
type ByteSize int64

// The units of a ByteSize.
const (
	Ki ByteSize = 1 << 10
	Mi ByteSize = 1 << 20
	Gi ByteSize = 1 << 30
)

type byteUnit struct {
	suffix string
	bytes  ByteSize
}

func byteUnits() [3]byteUnit {
	return [3]byteUnit{{"Gi", Gi}, {"Mi", Mi}, {"Ki", Ki}}
}

// String returns the size in the largest unit that gives a whole number.
func (s ByteSize) String() string {
	for _, u := range byteUnits() {
		if s >= u.bytes && s%u.bytes == 0 {
			return strconv.FormatInt(int64(s/u.bytes), 10) + u.suffix
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func parseByteSize(text string) (ByteSize, string) {
	number, unit := text, ByteSize(1)
	for _, u := range byteUnits() {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			number, unit = rest, u.bytes
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	switch {
	case err == nil && n > math.MaxInt64/uint64(unit):
		return 0, "is too large"
	case err == nil:
		return ByteSize(n) * unit, ""
	case strings.Trim(text, "0123456789") != "" && strings.IndexFunc(text, isDigit) == 0:
		// 32M, 32MB, 32mi: in other programs three different sizes.
		return 0, "has a unit other than Ki, Mi or Gi"
	}
	return 0, "is not a size"
}

func isDigit(r rune) bool { return '0' <= r && r <= '9' }
