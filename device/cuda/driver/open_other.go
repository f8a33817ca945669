//go:build !linux

package driver

import (
	"errors"
	"runtime"
)

// Open opens the driver's library, on Linux.
func Open() (API, error) {
	return nil, errors.New("NVIDIA's driver is opened on Linux only, not on " + runtime.GOOS)
}
