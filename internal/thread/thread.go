// Package thread runs functions one after the other on one goroutine, or on one thread
// of the operating system, as devices need that keep a context for each thread. Nap is the
// sleep of such a thread.
package thread

import (
	"runtime"

	"github.com/spillway-ml/spillway/internal/crash"
)

// Thread is a goroutine that runs the functions that it gets over Work, one after the
// other, until Work is closed.
type Thread struct{ Work chan func() }

// New starts a thread. Locked, its goroutine stays on one thread of the operating system:
// each hand-over to it then wakes that thread, which takes longer than a small kernel.
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

// Do runs f there and returns its error.
func (t *Thread) Do(f func() error) error {
	done := make(chan error, 1)
	t.Work <- func() { done <- f() }
	return <-done
}
