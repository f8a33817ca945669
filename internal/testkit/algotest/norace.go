//go:build !race

package algotest

// Race reports whether the race detector is on in this process.
const Race = false
