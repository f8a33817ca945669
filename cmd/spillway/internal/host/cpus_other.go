//go:build !linux

package host

import "runtime"

// OnlineCPUs is the number of processors that the system has.
func OnlineCPUs() int { return runtime.NumCPU() }
