// Package mmsg moves UDP datagrams in batches with as little as Go allows between
// the caller and the kernel: sendmmsg(2) and recvmmsg(2) by raw system calls, so
// that neither the scheduler nor the network poller takes part.
//
// It serves the load generator and the echo server, whose cost is the yardstick
// for everything that they measure; it shares no code with the resolver on purpose.
// A raw call that blocks holds the Go processor it runs on: callers are programs of
// one locked thread with nothing else to run.
package mmsg
