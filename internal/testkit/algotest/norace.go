//go:build !race

package algotest

// Race says that the race detector watches this process.
const Race = false
