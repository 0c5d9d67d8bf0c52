// Command dnsguard answers a Kubernetes node's DNS queries from a local cache
// and keeps the node's connection tracking free of DNS flows to pods that are
// gone.
//
// The package is wiring: it turns the configuration into the Configs of
// resolver, resolver/cache and resolver/upstream, owns their life cycle, and
// publishes their Stats. What they do not do is done here and nowhere else:
// logging, metrics, signals, HTTP.
//
//	main.go      subcommands and their exit codes
//	run.go       dnsguard run: signals, reload, start and end
//	daemon.go    the parts of a running daemon, and what a reload changes
//	probe.go     is it ready: answers through its own data path, an upstream was heard
//	conditions.go what keeps it from being ready, and what an operator should know
//	http.go      /healthz /readyz /metrics /statusz, on TCP and on the control socket
//	metrics.go   Stats as Prometheus metrics
//	status.go    Stats as /statusz
//
// A reload builds everything that the new configuration needs before it
// touches anything that the old one uses: a configuration that cannot be had
// leaves the running one as it was.
package main
