// Package thread runs functions on one thread of the operating system, as devices need
// that keep a context for each thread.
package thread

import (
	"runtime"

	"github.com/spillway-ml/spillway/internal/crash"
)

// Thread is a goroutine that is locked to its thread. It runs the functions that it gets
// over Work, one after the other, until Work is closed.
type Thread struct{ Work chan func() }

// New starts a thread.
func New() *Thread {
	t := &Thread{Work: make(chan func())}
	go func() {
		defer crash.Guard()
		runtime.LockOSThread()
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
