package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

// start is two readings of one clock: the runtime reads it without a system call, but
// only as a difference.
var start = struct {
	at   time.Time
	nano int64
}{time.Now(), clock()}

func clock() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// now is a clock that all processes of the host share, in nanoseconds.
func now() int64 { return start.nano + int64(time.Since(start.at)) }
