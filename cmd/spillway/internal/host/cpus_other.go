//go:build !linux

package host

import "runtime"

func OnlineCPUs() int { return runtime.NumCPU() }
