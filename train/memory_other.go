//go:build !linux

package train

// machineMemory is unknown on systems other than Linux.
func machineMemory() int64 { return 0 }
