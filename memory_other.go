//go:build !linux

package spillway

// machineMemory is unknown on systems other than Linux.
func machineMemory() int64 { return 0 }
