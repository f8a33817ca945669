//go:build linux && !cgo

package nvml

// Open opens the library and initialises it.
func Open() (Library, error) { return OpenSymbols() }
