//go:build !linux

package relay

// Relayed is false: there is none.
func Relayed() bool { return false }

// Run does nothing.
func Run() (status int, relay bool) { return 0, false }
