package thread

import (
	"time"

	"golang.org/x/sys/unix"
)

// Nap sleeps for d; the kernel adds about 50 µs. time.Sleep takes at least a millisecond in a
// process in which nothing else runs.
func Nap(d time.Duration) {
	rest := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&rest, nil) // a signal ends it early
}
