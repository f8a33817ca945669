//go:build !static

package dl

import "github.com/ebitengine/purego"

// Err returns the reason why this build can't open libraries; nil if it can.
func Err() error { return nil }

// Open opens a library.
func Open(path string, mode int) (uintptr, error) { return purego.Dlopen(path, mode) }

// Close releases a library that Open returned.
func Close(handle uintptr) error { return purego.Dlclose(handle) }

// Symbol returns the address of a symbol.
func Symbol(handle uintptr, name string) (uintptr, error) { return purego.Dlsym(handle, name) }

// Call calls the function at an address. A pointer converted to uintptr in the arguments stays
// valid during the call.
//
//go:uintptrescapes
func Call(fn uintptr, args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(fn, args...)
	return r
}
