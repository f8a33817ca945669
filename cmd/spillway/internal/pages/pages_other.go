//go:build !linux

package pages

// Leave does nothing: only Linux lists a process's mappings.
func Leave() {}
