// Package thread runs functions in sequence on one goroutine, or on one operating system thread,
// which devices with a context per thread need. Nap is a precise sleep for such a thread.
package thread

import (
	"runtime"

	"github.com/spillway-ml/spillway/internal/crash"
)

// Thread is a goroutine that runs the functions received from Work in sequence, until Work is
// closed.
type Thread struct{ Work chan func() }

// New starts a thread. If locked, its goroutine stays on one operating system thread; each
// function sent to it then wakes that thread, which takes longer than a small kernel.
func New(locked bool) *Thread {
	t := &Thread{Work: make(chan func())}
	go func() {
		defer crash.Guard()
		if locked {
			runtime.LockOSThread()
		}
		for f := range t.Work {
			f()
		}
	}()
	return t
}

// Do runs f on the thread, waits for it and returns its error.
func (t *Thread) Do(f func() error) error {
	done := make(chan error, 1)
	t.Work <- func() { done <- f() }
	return <-done
}
