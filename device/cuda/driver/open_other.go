//go:build !linux

package driver

import (
	"errors"
	"runtime"
)

// Open returns an error: the driver's library is supported on Linux only.
func Open() (API, error) {
	return nil, errors.New("NVIDIA's driver is opened on Linux only, not on " + runtime.GOOS)
}
