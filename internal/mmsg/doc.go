// Package mmsg moves UDP datagrams in batches with as little as Go allows between
// the caller and the kernel: recvmmsg(2) and sendmmsg(2) by raw system calls, so
// that neither the scheduler nor the network poller takes part.
//
// A raw call keeps the Go processor (P) that it runs on for as long as it takes.
// Where other goroutines need one, callers pass MSG_DONTWAIT, wait in the runtime's
// poller (syscall.RawConn), and keep batches small: 64 small datagrams take the
// kernel about 60 us. Where nothing else runs, a call may block.
//
// A Batch is made once and used again and again; nothing here allocates after
// that. It has one user at a time.
//
// Kernel: recvmmsg since Linux 2.6.33, sendmmsg since 3.0.
package mmsg
