// Package crash lets a program decide how it ends when one of its goroutines
// panics: recover sees the panics of its own goroutine alone.
package crash

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
)

var handler atomic.Pointer[func(what string)]

// Handle sets what a panic in a goroutine that has deferred Guard does; what says
// where it was and its value, in a line. It should end the process: the panic goes
// on if it returns. Without a handler panics are what they always are.
func Handle(f func(what string)) { handler.Store(&f) }

// Guard is deferred first in every goroutine of the module.
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

// site is the file and line of the innermost frame outside the runtime.
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
