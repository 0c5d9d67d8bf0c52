// Package socket opens the UDP sockets of the load generator and of the echo
// server: blocking ones, with room for the largest window, that the Go runtime
// knows nothing of. Both are programs of one thread with nothing else to run, so
// that they may block in raw system calls (internal/mmsg).
package socket
