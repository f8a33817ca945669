//go:build !linux

package doctor

// lockableBytes knows no limit: host memory is locked on Linux.
func lockableBytes() *int64 { return nil }
