// Package crash lets a program decide how it ends when any of its goroutines panics. The
// built-in recover sees only panics of its own goroutine.
package crash

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
)

var handler atomic.Pointer[func(what string)]

// Handle sets the function that is called for a panic in a goroutine that has deferred Guard.
// what is one line with the place and value of the panic. f should end the process; if it
// returns, the panic continues. Without a handler panics behave as usual.
func Handle(f func(what string)) { handler.Store(&f) }

// Guard must be deferred first in every goroutine of the module.
func Guard() {
	r := recover()
	if r == nil {
		return
	}
	if f := handler.Load(); f != nil {
		(*f)(fmt.Sprintf("panic at %s: %v", site(), r))
	}
	panic(r)
}

// Caught runs f and converts a panic, which is a broken invariant, to an error with its place. what
// names f.
func Caught(what string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("broken invariant: the %s panicked at %s: %v", what, site(), r)
		}
	}()
	return f()
}

// site returns the file and line of the innermost frame outside the runtime.
func site() string {
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs[:])])
	for {
		f, more := frames.Next()
		if !strings.HasPrefix(f.Function, "runtime.") || !more {
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
	}
}
