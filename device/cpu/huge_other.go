//go:build unix && !linux

package cpu

// adviseHuge does nothing: huge pages are asked for on Linux only.
func adviseHuge([]byte) {}
