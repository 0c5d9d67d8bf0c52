package config

import (
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Reference returns the configuration reference, in Markdown. It is kept in
// docs/configuration.md by this package's tests.
func Reference() string {
	var b strings.Builder
	b.WriteString(referenceHead)
	w := referenceWriter{&b, newDefaultTexts(flowText)}

	b.WriteString("\n## Top level\n" + referenceColumns)
	all := keys(Default())
	for _, k := range all {
		if _, inner := within(k.value); inner == nil {
			w.rows(k.name, k)
		}
	}
	for _, k := range all {
		_, inner := within(k.value)
		if inner == nil {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n", k.name)
		if _, ok := k.value.(mapping); ok {
			fmt.Fprintf(&b, "\n%s\n", k.meaning)
		}
		b.WriteString(referenceColumns)
		w.rows(k.name, k)
	}
	b.WriteString("\n## Every key with its default\n\n```yaml\n" + Default().String() + "```\n")
	return b.String()
}

// within returns the keys inside a value, and how their paths go on from the
// value's. Those of an entry are the ones of an entry that holds nothing yet.
func within(v value) (suffix string, m mapping) {
	switch v := v.(type) {
	case mapping:
		return "", v
	case list[Upstream]:
		return "[]", upstreamKeys(&v.fresh)
	case zoneCaps:
		return "[ZONE]", zoneKeys(new(CacheZone))
	}
	return "", nil
}

type referenceWriter struct {
	*strings.Builder
	defaults defaultTexts
}

// rows writes the table row of the key at path, and those of the keys inside.
func (w referenceWriter) rows(path string, k key) {
	suffix, inner := within(k.value)
	if _, section := k.value.(mapping); !section {
		fmt.Fprintf(w.Builder, "| `%s` | %s | %s | %s |\n", path, k.value.allowed(), w.defaults.of(path, k), k.meaning)
	}
	for _, k := range inner {
		w.rows(join(path+suffix, k.name), k)
	}
}

// defaultTexts says what holds when a key is left out.
type defaultTexts struct {
	format     func(*yaml.Node) string
	standalone map[string]value // outside Kubernetes
}

func newDefaultTexts(format func(*yaml.Node) string) defaultTexts {
	t := defaultTexts{format, make(map[string]value)}
	keys(defaults(SourceNone, defaultClusterDomain, defaultDNSService())).leaves(func(path string, k key) { t.standalone[path] = k.value })
	return t
}

// of returns the text, in Markdown, for a key that holds its default.
func (t defaultTexts) of(path string, k key) string {
	switch {
	case k.required:
		return "none, required"
	case k.otherwise != "":
		return k.otherwise
	}
	usual := t.format(k.value.encode())
	text := "`" + usual + "`"
	if v, ok := t.standalone[path]; ok {
		if other := t.format(v.encode()); other != usual {
			when := "with `kubernetes.source: none`"
			if path == "kubernetes.source" {
				when = "without a file"
			}
			text += fmt.Sprintf("; `%s` %s", other, when)
		}
	}
	return text
}

// flowText returns the node as YAML on one line.
func flowText(n *yaml.Node) string {
	text, err := yaml.Marshal(n)
	if err != nil {
		// As in Config.String.
		panic("config: " + err.Error())
	}
	return strings.TrimSpace(string(text))
}

const referenceColumns = "\n| Key | Allowed | Default | Meaning |\n|---|---|---|---|\n"

const referenceHead = `<!-- Written by the tests of internal/config from its key table: go test ./internal/config -update -->
# Configuration

` + "`dnsguard run --config FILE`" + ` reads one YAML file. It is read strictly: an unknown or doubled key, a value of
another type or out of range, and keys that contradict each other are errors. ` + "`dnsguard check --config FILE`" + `
lists all of them, one a line:

    FILE:LINE: path.to.key: what is wrong, allowed: what is allowed

**Flags.** Every key has a flag of the same dotted name, with one dash or two; flags win over the file.
Lists of words are separated by commas, and a flag given again adds to them
(` + "`--guard.services=kube-system/kube-dns --guard.services=dns/stub`" + `); ` + "`--listen=`" + ` is the empty list. What has a structure of its own is written as
YAML (` + "`--upstreams='{zones: [corp.example], servers: [10.1.2.3]}'`" + `, ` + "`--cache.zones='{corp.example: {positive: 10s}}'`" + `).
A flag's problem is told as ` + "`--path.to.key: ...`" + `.

**Defaults.** A list that is given replaces its default, with two exceptions, which are about zones: where ` + "`upstreams`" + ` does
not name the zone ` + "`.`" + `, the default entry for it stays; and ` + "`cache.zones`" + ` is laid over the default caps, zone by zone.

**Without a file** ` + "`kubernetes.source`" + ` is ` + "`none`" + `, and from that follows a resolver for any machine:
` + "`dnsguard run --listen 127.0.0.1:5353`" + ` serves from ` + "`/etc/resolv.conf`" + `, without Kubernetes, interception or guard.
A file with ` + "`kubernetes: {source: none}`" + ` gives the same.

**Values.** Sizes are bytes or take Ki, Mi and Gi. Durations are written as Go does: ` + "`300ms`, `1500ms` or `1.5s`, `1h30m`" + `. Domain names may end
in a dot and are compared without regard to case. YAML aliases are not read.

**Reload.** A changed file is picked up within two seconds, and on SIGHUP; a changed ConfigMap once the kubelet has
written it out, which it does about once a minute. A file with problems changes nothing: the configuration in use stays.
Some keys need a restart: [OPERATIONS.md](OPERATIONS.md#reload).
`
