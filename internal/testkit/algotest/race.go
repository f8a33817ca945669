//go:build race

package algotest

// Race says that the race detector watches this process. It sees one process at a time,
// and slows each down by some ten times: a test of many processes has it watch one job
// of a kind.
const Race = true
