package lab

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on an operating-system thread that nothing else uses
// meanwhile, and returns when f has. Where f reports false the thread is not
// as it was found (its namespace could not be restored): it is discarded
// instead of handed back to the scheduler.
//
// f never runs on the process's main thread. The runtime cannot end that one:
// it would stay parked for ever, holding a namespace that should vanish, and
// everything that reads /proc/self would see that namespace as the process's.
func onThread(f func() (restored bool)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread stays busy here, so the next try gets another.
			onThread(f)
			runtime.UnlockOSThread()
			return
		}
		if f() {
			runtime.UnlockOSThread()
		}
	}()
	<-done
}
