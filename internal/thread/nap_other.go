//go:build !linux

package thread

import "time"

// Nap sleeps for d.
func Nap(d time.Duration) { time.Sleep(d) }
