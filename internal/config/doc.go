// Package config is dnsguard's one configuration: typed, complete and
// validated before anything else sees it.
//
// Data flow:
//
//	file --yaml.Node--+
//	                  +--> keys bound to a Config --> cross checks --> *Config, or every Problem
//	flags ------------+
//
// The key table in keys.go is the only place that knows a key: its name, the
// field it sets, what it may hold and what it means. Decoding, command-line
// flags, error messages, [Config.String], [Config.Hash] and [Reference] (which
// becomes docs/configuration.md) all walk that table. The defaults are one Go
// value in default.go.
//
// # Which defaults hold
//
// Two keys decide about the defaults of others, so the sources are read twice:
// once to learn those two, once onto the defaults that follow from them.
//
//   - kubernetes.source defaults to api when there is a file and to none when
//     there is no file at all.
//   - Where it is none, the root zone's upstream is /etc/resolv.conf instead of
//     the cluster's DNS Service, and the guard is off.
//   - clusterDomain names the zone whose cache caps default to the short ones.
//
// upstreams and cache.zones are about zones, and a zone that is not mentioned
// keeps its default: an upstreams list without "." gets the default entry for
// it, and cache.zones is laid over the default caps zone by zone. Every other
// list replaces its default.
//
// # Invariants
//
//   - A *Config that Load or Parse returned has every field set and has passed
//     every check; with any Problem there is no *Config at all.
//   - Every Problem of a source is reported, not the first: an operator mends a
//     file once. A key that is wrong takes part in no cross check, so that one
//     mistake is one line.
//   - Every Problem with a file has that file's line, syntax errors included.
//   - Parse(c.String()) gives a Config equal to c.
//
// The package reads files and nothing else: no environment, no name
// resolution, no look at the machine. What depends on the machine (an empty
// kubernetes.nodeName, limits.readers 0, log.format auto) stays as written and
// is for the caller to fill in.
package config
