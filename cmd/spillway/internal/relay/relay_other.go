//go:build !linux

package relay

// Relayed returns false: there are no relays.
func Relayed() bool { return false }

// Run does nothing.
func Run() (status int, relay bool) { return 0, false }
