//go:build !linux || static

package dl

import (
	"errors"
	"runtime"
)

// Err returns the reason why this build opens no libraries.
func Err() error {
	if runtime.GOOS != "linux" {
		return errors.New("libraries are opened on Linux only, not on " + runtime.GOOS)
	}
	return errors.New("this is the static build of spillway, which opens no libraries; use the build with GPU and MPI")
}

// Open returns Err.
func Open(string, int) (uintptr, error) { return 0, Err() }

// Close does nothing.
func Close(uintptr) error { return nil }

// Symbol returns Err.
func Symbol(uintptr, string) (uintptr, error) { return 0, Err() }

// Call is never called: there is no address to call.
func Call(uintptr, ...uintptr) uintptr { panic(Err()) }
