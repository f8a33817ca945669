//go:build !static

package dl

import "github.com/ebitengine/purego"

// Err is why this build opens no libraries; nil: it does.
func Err() error { return nil }

// Open opens a library.
func Open(path string, mode int) (uintptr, error) { return purego.Dlopen(path, mode) }

// Close gives up what Open has returned.
func Close(handle uintptr) error { return purego.Dlclose(handle) }

// Symbol returns the address of a name.
func Symbol(handle uintptr, name string) (uintptr, error) { return purego.Dlsym(handle, name) }

// Call calls a function at an address. A pointer that is converted in the arguments of a
// call stays valid during it.
//
//go:uintptrescapes
func Call(fn uintptr, args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(fn, args...)
	return r
}
