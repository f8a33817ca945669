// Package futex lets a thread sleep in the kernel until a word changes, and be woken by
// whoever changed it: one system call, without the runtime's scheduler. The word may lie in
// memory that processes share.
package futex

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	opWait = 0
	opWake = 1
)

// Wait returns when word is no longer old, somebody has woken it, or the time
// has passed. It may return earlier.
func Wait(word *atomic.Uint32, old uint32, most time.Duration) {
	ts := unix.NsecToTimespec(int64(most))
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), opWait, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// Wake wakes whoever sleeps on word.
func Wake(word *atomic.Uint32) {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), opWake, 1<<30, 0, 0, 0)
}
