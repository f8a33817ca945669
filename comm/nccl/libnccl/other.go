//go:build !linux || !(amd64 || arm64)

package libnccl

import (
	"errors"
	"runtime"

	"github.com/spillway-ml/spillway/comm/nccl"
)

// Open returns an error: NCCL is not supported on this platform.
func Open() (nccl.API, error) {
	return nil, errors.New("NCCL is opened on Linux on amd64 and arm64 only, not on " + runtime.GOOS + " on " + runtime.GOARCH)
}
