//go:build !linux

package host

import "runtime"

// OnlineCPUs returns the number of processors of the system.
func OnlineCPUs() int { return runtime.NumCPU() }
