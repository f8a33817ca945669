package thread

import (
	"time"

	"golang.org/x/sys/unix"
)

// Nap sleeps for d, of which the kernel makes some 50 µs more. The runtime's own sleep takes
// a millisecond at least in a process in which nothing else runs.
func Nap(d time.Duration) {
	rest := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&rest, nil) // a signal ends it early
}
