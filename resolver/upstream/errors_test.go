package upstream

import (
	"fmt"
	"syscall"
	"testing"
)

// What counts as want of something on this machine, the process that asks included.
func TestIsLocal(t *testing.T) {
	for err, want := range map[error]bool{
		syscall.EMFILE: true, syscall.ENFILE: true, syscall.ENOMEM: true, syscall.ENOBUFS: true, syscall.EAGAIN: true, errSockets: true,
		syscall.ENETUNREACH: false, syscall.EADDRNOTAVAIL: false, syscall.EACCES: false, syscall.ECONNREFUSED: false, errMovedOn: false, nil: false,
	} {
		if got := IsLocal(err); got != want {
			t.Errorf("%v: %t, want %t", err, got, want)
		}
		if err != nil {
			if got := IsLocal(fmt.Errorf("socket: %w", err)); got != want {
				t.Errorf("%v, wrapped: %t, want %t", err, got, want)
			}
		}
	}
}
