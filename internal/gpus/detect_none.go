//go:build !linux || !cgo

package gpus

import "errors"

// Detect needs NVML, which this build has not: it is for Linux, with cgo.
func Detect() ([]GPU, error) {
	return nil, errors.New("this build has no NVML (it is in builds for Linux with CGO_ENABLED=1); name a GPU instead")
}
