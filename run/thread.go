package run

import (
	"runtime"

	"github.com/spillway-ml/spillway/internal/crash"
)

// thread is a goroutine that is locked to its thread, as devices with a thread's
// context need.
type thread struct{ work chan func() }

func newThread() *thread {
	t := &thread{work: make(chan func())}
	go func() {
		defer crash.Guard()
		runtime.LockOSThread()
		for f := range t.work {
			f()
		}
	}()
	return t
}

// do runs f there and returns its error.
func (t *thread) do(f func() error) error {
	done := make(chan error, 1)
	t.work <- func() { done <- f() }
	return <-done
}
