// Package deploy tests what an operator applies: daemonset.yaml, the overlays, the
// Helm chart, the alerts and the dashboard. It holds no code of the product: Overlay and
// Chart render as kubectl and Helm do, for these tests and, by the command render, for
// the end-to-end tests.
//
// Each is read by the program that will read it on a cluster, as a library:
// kustomize renders the overlays, Helm the chart, the API's own types decode the
// objects strictly, Prometheus evaluates the alerts. What a rendering says about
// dnsguard (arguments, probes, configuration, permissions) is put to dnsguard
// itself: to the binary, and to a stand-in API server that knows the rendered RBAC
// rules and nothing else.
package deploy
