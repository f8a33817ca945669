//go:build !linux

package hostmem

// Machine returns 0, unknown, on systems other than Linux.
func Machine() int64 { return 0 }
