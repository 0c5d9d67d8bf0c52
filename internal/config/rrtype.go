package config

import (
	"slices"
	"strings"
)

// An RRType is the number of a resource record type.
type RRType uint16

// The types whose search-list walks can be finished (IANA's DNS parameters).
// PTR is not among them: a reverse name is complete, and no resolver walks it.
const (
	TypeA     RRType = 1
	TypeMX    RRType = 15
	TypeTXT   RRType = 16
	TypeAAAA  RRType = 28
	TypeSRV   RRType = 33
	TypeNAPTR RRType = 35
	TypeSVCB  RRType = 64
	TypeHTTPS RRType = 65
)

type rrTypeName struct {
	rrType RRType
	name   string
}

func rrTypeNames() []rrTypeName {
	return []rrTypeName{
		{TypeA, "A"},
		{TypeAAAA, "AAAA"},
		{TypeHTTPS, "HTTPS"},
		{TypeMX, "MX"},
		{TypeNAPTR, "NAPTR"},
		{TypeSRV, "SRV"},
		{TypeSVCB, "SVCB"},
		{TypeTXT, "TXT"},
	}
}

// String returns the type's mnemonic.
func (t RRType) String() string {
	for _, n := range rrTypeNames() {
		if n.rrType == t {
			return n.name
		}
	}
	return "unknown"
}

func parseRRType(text string) (RRType, string) {
	all := rrTypeNames()
	i := slices.IndexFunc(all, func(n rrTypeName) bool { return strings.EqualFold(n.name, text) })
	switch {
	case i >= 0:
		return all[i].rrType, ""
	case strings.EqualFold(text, "PTR"):
		return 0, "is never walked: a reverse name is complete"
	}
	return 0, "is not a type whose walks can be finished"
}
