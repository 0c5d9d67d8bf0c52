// Package kube tells what the cluster says about the watched Services and this
// node's pods, as immutable states. It is the only importer of client-go.
//
// # Data flow
//
//	API  --reflectors: list, watch--.
//	                                 >--> feeds --(pure)--> State --> OnChange
//	File --poll, parse, check-------'
//
// A [Source] keeps the feeds up to date: one for each watched Service, one for
// its EndpointSlices, and, where they are wanted, one each for this node's Pods
// and for the Namespaces. A feed holds of each object only what is used.
// [Watcher] turns all feeds into one [State] whenever any of them has changed,
// and hands out those that differ from the one before: level-triggered, the
// latest wins, from one goroutine.
//
// # Invariants
//
//   - Nothing is said that is not known. Each part of a [State] is nil until
//     every feed that it is made of has been read once, and stays as it was last
//     known while the source is out of reach. Nothing ever waits for the source.
//   - How old the news are is known at any time: [Stats].Age counts from the
//     last bytes that came from the API server for the watch that has been
//     silent longest. A watch that is open and well hears a bookmark a minute.
//   - The API server is asked for no more than is needed: each watch is
//     restricted by selectors, goes on where it was cut off, is never relisted
//     without need (410 Gone), and backs off with jitter, up to a minute.
//   - Endpoints are read as kube-proxy reads them: per port name; the first
//     address only; ports without a name or number left out; the same address
//     and port in several slices once.
//   - Both sources give the same state for the same objects. A file that is
//     wrong anywhere is refused as a whole, and the state stays.
//
// The package does not log. client-go does, through klog, whose destination is
// one for the whole process: main says where with [RouteLogs].
//
// Memory: the clientset's own typed clients bring the types of every API group
// along (kubernetes/scheme registers them all); a REST client with a scheme of
// the four kinds that are read needs 9 MiB less of resident memory and half of
// the binary, measured with client-go v0.37.2.
//
// Sources: Kubernetes API concepts (efficient detection of changes, streaming
// lists); pkg/proxy/endpointslicecache.go and pkg/proxy/serviceport.go for what
// kube-proxy makes of the objects; pkg/kubelet/network/dns for a pod's
// resolv.conf.
package kube
