//go:build !linux

package doctor

// lockableBytes returns nil: host memory is locked on Linux only.
func lockableBytes() *int64 { return nil }
