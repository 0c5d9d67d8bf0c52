package config

import (
	"strings"
)

// Lengths of RFC 1035 section 2.3.4, in the text form without the trailing dot.
const (
	maxLabel = 63
	maxName  = 253
)

// A ServiceName names a Kubernetes Service.
type ServiceName struct {
	Namespace string
	Name      string
}

// String returns namespace/name.
func (s ServiceName) String() string { return s.Namespace + "/" + s.Name }

func parseServiceName(text string) (ServiceName, string) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		return ServiceName{}, "has no namespace"
	}
	if !isObjectLabel(namespace) || !isObjectLabel(name) {
		return ServiceName{}, "is not namespace/name"
	}
	return ServiceName{Namespace: namespace, Name: name}, ""
}

// parseDomain folds a domain name: lower case and without the trailing dot,
// which is how every name leaves this package. Zones are compared as text later
// on, so a name written in two ways must not become two.
func parseDomain(text string) (string, string) {
	name := strings.ToLower(text)
	if name == "." {
		return name, ""
	}
	name = strings.TrimSuffix(name, ".")
	if len(name) > maxName {
		return "", "is longer than 253 characters"
	}
	for label := range strings.SplitSeq(name, ".") {
		switch {
		case label == "":
			return "", "has an empty label"
		case len(label) > maxLabel:
			return "", "has a label longer than 63 characters"
		case strings.ContainsFunc(label, isNotASCII):
			return "", "is not ASCII: write the xn-- form"
		case strings.ContainsFunc(label, isNotNameRune):
			return "", "has a character that is no letter, digit, - or _"
		}
	}
	return name, ""
}

// parseSubdomain is parseDomain for names that lie below the root.
func parseSubdomain(text string) (string, string) {
	name, wrong := parseDomain(text)
	if name == "." {
		return "", "is the root"
	}
	return name, wrong
}

// parseNodeName checks a Kubernetes object name (RFC 1123 subdomain, lower case
// only); empty is allowed.
func parseNodeName(text string) (string, string) {
	if text == "" {
		return "", ""
	}
	if len(text) > maxName {
		return "", "is longer than 253 characters"
	}
	for label := range strings.SplitSeq(text, ".") {
		if !isObjectLabel(label) {
			return "", "is not a node name"
		}
	}
	return text, ""
}

// isObjectLabel reports whether label is what Kubernetes calls an RFC 1123 label.
func isObjectLabel(label string) bool {
	return label != "" && len(label) <= maxLabel &&
		label[0] != '-' && label[len(label)-1] != '-' &&
		!strings.ContainsFunc(label, func(r rune) bool { return r == '_' || isNotNameRune(r) })
}

func isNotASCII(r rune) bool { return r >= 0x80 }

func isNotNameRune(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
}

// isWithin reports whether the folded name lies in the folded zone or is it.
func isWithin(name, zone string) bool {
	return zone == "." || name == zone || strings.HasSuffix(name, "."+zone)
}
