//go:build !linux

package main

import "runtime"

func onlineCPUs() int { return runtime.NumCPU() }
