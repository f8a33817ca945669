//go:build !linux

package nvml

import (
	"fmt"
	"runtime"
)

// Open returns an error, because the library is opened on Linux only.
func Open() (Library, error) {
	return nil, fmt.Errorf("%w: it is opened on Linux only, not on %s", ErrNoLibrary, runtime.GOOS)
}
