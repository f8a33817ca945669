package shm

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0
	futexWake = 1
)

// sleep returns when word is no longer old, another rank has woken it, or the time has passed. The
// word is shared between processes.
func sleep(word *atomic.Uint32, old uint32, most time.Duration) {
	ts := unix.NsecToTimespec(int64(most))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// wake wakes all ranks that sleep on word.
func wake(word *atomic.Uint32) {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, 1<<30, 0, 0, 0)
}

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
