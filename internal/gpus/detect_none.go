//go:build !linux || !cgo

package gpus

import "errors"

// errNoNVML: its binding is for Linux, with cgo.
var errNoNVML = errors.New("this build has no NVML (it is in builds for Linux with CGO_ENABLED=1); name a GPU instead")

// Detect needs NVML, which this build has not.
func Detect() ([]GPU, error) { return nil, errNoNVML }

// Used needs NVML, which this build has not.
func Used([16]byte) (int64, error) { return 0, errNoNVML }
